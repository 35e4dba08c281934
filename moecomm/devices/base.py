"""The contract of a device: its memory, and streams of work that run in order, later than they are given.

A stream does its work in the order in which it was given. Streams wait for each other by events: marks in a stream,
which pass when all work before them is done. The host waits only where it says so.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moecomm.devices.queue import Queue
from moecomm.kernels.eager import EagerKernels
from moecomm.kernels.signals import SignalKernels, WireKernels
from moecomm.kernels.summary import SummarizingKernels
from moecomm.kernels.wire import Wire

__all__ = ["AsynchronousDevice", "Device", "DeviceIdentity", "DeviceMemory", "Event", "Stream"]


@dataclasses.dataclass(frozen=True)
class DeviceIdentity:
    """What the peers must know of a rank's device, to tell whether they can reach its memory.

    Attributes:
        name: of the device, the same in all processes of a host; empty for the CPU.
        reachable: names of the devices in whose memory this one can store, load and signal, its own included.
        ipc_problem: the sentence why this process cannot share the device's memory with others; empty if it can.
        remedy: the sentence that says what would help against that.
    """

    name: str = ""
    reachable: tuple[str, ...] = ("",)
    ipc_problem: str = ""
    remedy: str = ""


class DeviceMemory(abc.ABC):
    """Memory of a device, zero at first; given back when this dies.

    Attributes:
        address: on the device.
        nbytes: its size.
    """

    address: int
    nbytes: int


class Event(abc.ABC):
    """A mark in a stream."""

    @abc.abstractmethod
    def has_passed(self) -> bool:
        """Whether all work before it is done; does not wait."""


class Stream(abc.ABC):
    """Work in order."""

    @abc.abstractmethod
    def submit(self, work: Callable[[], object]) -> None:
        """Gives it work: a function that may run at once and then only launches, or may run later.

        What it reads and writes must exist now, and live until the work is done.
        """

    @abc.abstractmethod
    def record(self) -> Event:
        """A mark behind all work given so far."""

    @abc.abstractmethod
    def wait(self, event: Event) -> None:
        """Work given from now on begins after the event; the host does not wait."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """The host waits for all work given so far."""

    @abc.abstractmethod
    def is_same(self, other: Stream) -> bool:
        """Whether both are one stream."""


class Device(abc.ABC):
    """Where a communicator's tensors live.

    Attributes:
        kind: `cpu` or `cuda`; all ranks must have the same.
        torch_device: of these tensors.
        is_host: the host reads and writes its memory, and its work is done at once.
    """

    kind: str
    torch_device: torch.device
    is_host: bool

    @abc.abstractmethod
    def row_kernels(self) -> Any:
        """Its row kernels, `moecomm.kernels.base.RowKernels`."""

    @abc.abstractmethod
    def eager_kernels(self) -> EagerKernels:
        """Its low-latency kernels."""

    @abc.abstractmethod
    def identity(self) -> DeviceIdentity:
        """What peers must know of it."""

    @abc.abstractmethod
    def default_memory_limit(self, num_sharers: int) -> int:
        """Bytes of receive memory if the user does not say; `num_sharers` ranks use this device."""

    @abc.abstractmethod
    def make_queue(
        self,
        boards: Sequence[int],
        rank: int,
        timeout: float,
        gone: Callable[[], list[int]],
        wire: Wire | None = None,
    ) -> Queue:
        """The queue of one communicator.

        Arguments:
            boards: by rank, addresses on this device of boards of `board_bytes` bytes, zero at first.
            rank: mine.
            timeout: seconds that one wait on the device may last.
            gone: gives the ranks whose devices will do nothing more.
            wire: how kernels reach ranks whose boards have no address here, which is 0 then; None: all have one.
        """

    def board_bytes(self, num_ranks: int) -> int:
        """Bytes of a rank's board; 0 = it needs none."""
        return 0


class AsynchronousDevice(Device):
    """A device with streams, whose memory the host does not read."""

    is_host = False

    @abc.abstractmethod
    def row_kernels(self) -> SummarizingKernels: ...

    @abc.abstractmethod
    def signal_kernels(self) -> SignalKernels:
        """Its signals and waits."""

    @abc.abstractmethod
    def wire_kernels(self) -> WireKernels:
        """Its puts, signals and waits where some ranks' memory has no address here."""

    @abc.abstractmethod
    def allocate(self, nbytes: int, *, is_exported: bool) -> DeviceMemory:
        """Zero memory; the host waits until it is.

        Arguments:
            nbytes: at least so many.
            is_exported: other processes are to open it.

        Raises:
            OSError: there is not enough.
        """

    @abc.abstractmethod
    def export(self, memory: DeviceMemory) -> bytes:
        """What another process needs to open the memory.

        Raises:
            OSError: the system does not allow it.
        """

    @abc.abstractmethod
    def open(self, handle: bytes, nbytes: int) -> DeviceMemory:
        """Memory of another process, or of another device of this one, from what `export` gave.

        Raises:
            OSError: the system does not allow it.
        """

    @abc.abstractmethod
    def current_stream(self) -> Stream:
        """The stream to which the calling thread's work on tensors goes."""

    @abc.abstractmethod
    def new_stream(self) -> Stream:
        """One more stream."""

    @abc.abstractmethod
    def pinned(self, tensor: Tensor) -> Tensor:
        """A copy of a host tensor, in host memory that the device copies from and to without the host waiting."""

    @abc.abstractmethod
    def bytes_at(self, address: int, nbytes: int, owner: object) -> Tensor:
        """`[nbytes]` uint8: memory at an address of the device, as a tensor that keeps `owner` alive; nbytes > 0."""

    def view(self, address: int, owner: object, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """A tensor of memory at an address, a multiple of the dtype's size; it keeps `owner` alive."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)
        storage = self.bytes_at(address, count * dtype.itemsize, owner).untyped_storage()
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        viewed: Tensor = torch.empty(0, dtype=dtype, device=self.torch_device).set_(storage, 0, tuple(shape), strides)
        return viewed
