"""The signals of `signals.py` as `moecomm.kernels.signals.SignalKernels`."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from moecomm.kernels.triton import signals

__all__ = ["TritonSignalKernels"]


@final
class TritonSignalKernels:
    """Signals and waits for CUDA devices, and for memory of the CPU where Triton interprets."""

    def board_bytes(self, num_ranks: int, num_slots: int) -> int:
        return signals.board_bytes(num_ranks, num_slots)

    def make_status(self, num_ranks: int, device: torch.device) -> Tensor:
        return signals.make_status(num_ranks, device)

    def signal_all(self, boards: Tensor, rank: int, slot: int, *, n: int, status: Tensor) -> None:
        signals.signal_all(boards, rank, slot, n=n, status=status)

    def wait(self, board: int, slot: int, at_least: int, *, status: Tensor, timeout_ns: int) -> None:
        signals.wait(board, slot, at_least, status=status, timeout_ns=timeout_ns)

    def raise_if_behind(self, status: Tensor, operation: str, *, describe: Callable[[int], str]) -> None:
        signals.raise_if_behind(status, operation, describe=describe)
