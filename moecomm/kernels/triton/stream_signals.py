"""Signals, waits and puts as `moecomm.kernels.signals` wants them."""

from __future__ import annotations

from typing import final

from torch import Tensor

from moecomm.kernels.far_runs import Memory, Runs
from moecomm.kernels.triton import far_push, far_wait, signals
from moecomm.kernels.wire import Wire

__all__ = ["TritonSignalKernels", "TritonWireKernels"]


@final
class TritonSignalKernels:
    """Signals and waits for CUDA devices, and for memory of the CPU where Triton interprets."""

    board_bytes = staticmethod(signals.board_bytes)
    make_status = staticmethod(signals.make_status)
    signal_all = staticmethod(signals.signal_all)
    wait = staticmethod(signals.wait)
    raise_if_behind = staticmethod(signals.raise_if_behind)


@final
class TritonWireKernels:
    """Puts over NVSHMEM, signals behind them, and waits; where Triton interprets, something stands in for NVSHMEM."""

    wait = staticmethod(far_wait.far_wait)

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
        to: int | None = None,
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
            to=to,
        )
