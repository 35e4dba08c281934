"""Signals, waits and puts as `moecomm.kernels.signals` wants them."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from moecomm.kernels.far_runs import Memory, Runs
from moecomm.kernels.triton import far_push, far_wait, signals
from moecomm.kernels.wire import Wire

__all__ = ["TritonSignalKernels", "TritonWireKernels"]


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


@final
class TritonWireKernels:
    """Puts over NVSHMEM, signals behind them, and waits; where Triton interprets, something stands in for NVSHMEM."""

    def push(
        self,
        wire: Wire,
        runs: Runs,
        memory: Memory,
        slot: int,
        *,
        n: int,
        parts: int,
        arrivals: Tensor,
        status: Tensor,
    ) -> None:
        far_push.far_push(
            *(wire, runs),
            source=memory,
            region=memory,
            slot=slot,
            n=n,
            parts=parts,
            arrivals=arrivals,
            status=status,
        )

    def wait(self, wire: Wire, slot: int, at_least: int, *, status: Tensor, timeout_ns: int) -> None:
        far_wait.far_wait(wire, slot, at_least, status=status, timeout_ns=timeout_ns)
