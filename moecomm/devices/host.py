"""The CPU as a device: work is done when it is given."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from moecomm import _C
from moecomm.devices.base import Device, DeviceIdentity
from moecomm.devices.queue import Queue, Rooms, Tensors
from moecomm.kernels.base import RowKernels
from moecomm.kernels.eager import EagerKernels
from moecomm.kernels.registry import chosen_eager_kernels, chosen_kernels
from moecomm.kernels.wire import Wire

__all__ = ["HostDevice", "HostQueue"]

T = TypeVar("T", bound=tuple[Any, ...])


class HostDevice(Device):
    """The CPU."""

    kind = "cpu"
    torch_device = torch.device("cpu")
    is_host = True

    def row_kernels(self) -> RowKernels:
        return chosen_kernels("cpu")

    def eager_kernels(self) -> EagerKernels:
        return chosen_eager_kernels("cpu")

    def identity(self) -> DeviceIdentity:
        return DeviceIdentity()

    def default_memory_limit(self, num_sharers: int) -> int:
        """All the memory that this process could get: the machine's, or its control group's if that is less."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
            try:
                text = Path(path).read_text().strip()
            except OSError:
                continue
            if text.isdigit():
                total = min(total, int(text))
        return total

    def make_queue(
        self,
        boards: Sequence[int],
        rank: int,
        timeout: float,
        gone: Callable[[], list[int]],
        wire: Wire | None = None,
    ) -> Queue:
        return HostQueue()


class HostQueue(Queue):
    """Does everything at once."""

    def run(self, work: Callable[..., object], *arguments: Any) -> None:
        work(*arguments)

    def make(self, rooms: Tensors | None, work: Callable[..., Tensors], *arguments: Any) -> Tensors:
        return work(*arguments)

    def fill(self, room: Tensor | None, work: Callable[..., Tensor], *arguments: Any) -> Tensor:
        return work(*arguments, room)

    def call(self, rooms: Rooms | None, work: Callable[..., T], *arguments: Any) -> T:
        return work(*arguments)

    def give(self, rooms: Tensors | None, tensors: Tensors) -> Tensors:
        return tensors

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor

    def count_routes(
        self, kernels: RowKernels, topk_idx: Tensor, expert_rank: Tensor, num_ranks: int, counts: Tensor
    ) -> int:
        return kernels.count_routes(topk_idx, expert_rank, num_ranks, counts)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def zero(self, address: int, nbytes: int) -> None:
        ctypes.memset(address, 0, nbytes)

    def zero_rows(self, address: int, row_bytes: int, spans: Sequence[tuple[int, int]]) -> None:
        for start, end in spans:
            self.zero(address + start * row_bytes, (end - start) * row_bytes)

    def claim(self, block: _C.Block) -> None:
        """Nothing is late."""

    def claim_for_caller(self, block: _C.Block) -> None:
        """Nothing is late."""

    def tensors_in(self, call: Any, block: _C.Block) -> Any:
        return block

    def close(self) -> None:
        """Nothing is late."""
