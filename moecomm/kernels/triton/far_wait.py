"""Waits, on the device, for signals that came over a network."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.triton.compile_case import CompileCase
from moecomm.kernels.triton.far_push import check_status
from moecomm.kernels.triton.lanes import acquire_lanes, acquire_some_lanes
from moecomm.kernels.triton.nvshmem_device import MOST_REGISTERS, launch_linked, refresh
from moecomm.kernels.triton.runtime import check_device
from moecomm.kernels.triton.signals import expected_of
from moecomm.kernels.wire import Wire

__all__ = ["far_wait", "far_wait_kernel", "linked_cases"]


@triton.jit(
    do_not_specialize=["board", "slot", "at_least", "num_ranks", "timeout_ns"],
    do_not_specialize_on_alignment=["expected", "awaited", "status"],
)
def far_wait_kernel(
    board: tl.int64,
    slot: tl.int64,
    at_least: tl.int64,
    expected: tl.tensor,
    num_ranks: tl.int32,
    awaited: tl.tensor,
    status: tl.tensor,
    timeout_ns: tl.int64,
    FROM_MEMORY: tl.constexpr,
    IS_SOME: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """As `signals.wait_kernel`; what a network wrote before it added to a counter is visible as well.

    IS_SOME: only lanes of ranks are waited for whose number of `awaited`, `[R]` int32, is not 0.
    """
    if FROM_MEMORY:
        at_least = tl.load(expected)
    if IS_SOME:
        ranks = tl.arange(0, RANKS)
        is_awaited = tl.load(awaited + ranks, mask=ranks < num_ranks, other=0) != 0
        acquire_some_lanes(board, slot, at_least, num_ranks, is_awaited, status, timeout_ns, False, RANKS)
    else:
        acquire_lanes(board, slot, at_least, num_ranks, status, timeout_ns, RANKS)
    refresh(board + slot * num_ranks * 8)


def far_wait(
    wire: Wire,
    slot: int,
    at_least: int | Tensor,
    *,
    status: Tensor,
    timeout_ns: int,
    awaited: Tensor | None = None,
) -> None:
    """As `signals.wait` for my board, which near ranks store to and a network adds to for far ones.

    Arguments:
        wire: who is reached how.
        slot, at_least, status, timeout_ns: as there.
        awaited: `[R]` int32 on the device: lanes of ranks with 0 are not waited for. None: all are.

    Raises:
        ValueError: status or at_least is not as said there, awaited is not as said, or a number is out of range.
    """
    device = check_device("boards", wire.boards)
    wire.lane(slot)
    check_status(status, wire)
    if awaited is not None and (
        awaited.dtype is not torch.int32 or awaited.shape != (wire.num_ranks,) or awaited.device != device
    ):
        raise ValueError(
            f"awaited is {awaited.dtype} {list(awaited.shape)} on {awaited.device}; wanted torch.int32 "
            f"[{wire.num_ranks}] on {device}"
        )
    value, expected = expected_of(at_least, status, timeout_ns)
    launch_linked(
        far_wait_kernel,
        1,
        device,
        wire.library,
        *(wire.board, slot, value, expected, wire.num_ranks, wire.pes if awaited is None else awaited),
        *(status, timeout_ns),
        FROM_MEMORY=isinstance(at_least, Tensor),
        IS_SOME=awaited is not None,
        RANKS=triton.next_power_of_2(wire.num_ranks),
    )


def linked_cases() -> list[CompileCase]:
    """For two ranks and for up to 128, and both kinds of value; some ranks alone."""
    return [
        CompileCase(
            name=f"far_wait {ranks} ranks{', value in memory' * from_memory}{', some alone' * is_some}",
            kernel=far_wait_kernel,
            max_registers=MOST_REGISTERS,
            signature={
                **dict.fromkeys(["board", "slot", "at_least", "timeout_ns"], "i64"),
                **dict.fromkeys(["expected", "status"], "*i64"),
                "num_ranks": "i32",
                "awaited": "*i32",
                **dict.fromkeys(["FROM_MEMORY", "IS_SOME", "RANKS"], "constexpr"),
            },
            constexprs={"FROM_MEMORY": from_memory, "IS_SOME": is_some, "RANKS": ranks},
        )
        for ranks in (2, 128)
        for from_memory, is_some in ((False, False), (True, False), (False, True))
    ]
