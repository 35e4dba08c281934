"""Waits, on the device, for signals that came over a network."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.triton.compile_case import CompileCase
from moecomm.kernels.triton.far_push import check_status
from moecomm.kernels.triton.lanes import acquire_lanes
from moecomm.kernels.triton.nvshmem_device import launch_linked, refresh
from moecomm.kernels.triton.runtime import check_device
from moecomm.kernels.triton.signals import expected_of
from moecomm.kernels.wire import Wire

__all__ = ["far_wait", "far_wait_kernel", "linked_cases"]


@triton.jit(
    do_not_specialize=["board", "slot", "at_least", "num_ranks", "timeout_ns"],
    do_not_specialize_on_alignment=["expected", "status"],
)
def far_wait_kernel(
    board: tl.int64,
    slot: tl.int64,
    at_least: tl.int64,
    expected: tl.tensor,
    num_ranks: tl.int32,
    status: tl.tensor,
    timeout_ns: tl.int64,
    FROM_MEMORY: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """As `signals.wait_kernel`; what a network wrote before it added to a counter is visible as well."""
    if FROM_MEMORY:
        acquire_lanes(board, slot, tl.load(expected), num_ranks, status, timeout_ns, RANKS)
    else:
        acquire_lanes(board, slot, at_least, num_ranks, status, timeout_ns, RANKS)
    refresh(board + slot * num_ranks * 8)


def far_wait(wire: Wire, slot: int, at_least: int | Tensor, *, status: Tensor, timeout_ns: int) -> None:
    """As `signals.wait` for my board, which near ranks store to and a network adds to for far ones.

    Raises:
        ValueError: status or at_least is not as said there, or a number is out of range.
    """
    device = check_device("boards", wire.boards)
    wire.lane(slot)
    check_status(status, wire)
    value, expected = expected_of(at_least, status, timeout_ns)
    launch_linked(
        far_wait_kernel,
        1,
        device,
        wire.library,
        *(wire.board, slot, value, expected, wire.num_ranks, status, timeout_ns),
        FROM_MEMORY=isinstance(at_least, Tensor),
        RANKS=triton.next_power_of_2(wire.num_ranks),
    )


def linked_cases() -> list[CompileCase]:
    """For two ranks and for up to 128, and both kinds of value."""
    return [
        CompileCase(
            name=f"far_wait {ranks} ranks{', value in memory' if from_memory else ''}",
            kernel=far_wait_kernel,
            signature={
                **dict.fromkeys(["board", "slot", "at_least", "timeout_ns"], "i64"),
                **dict.fromkeys(["expected", "status"], "*i64"),
                "num_ranks": "i32",
                **dict.fromkeys(["FROM_MEMORY", "RANKS"], "constexpr"),
            },
            constexprs={"FROM_MEMORY": from_memory, "RANKS": ranks},
        )
        for ranks in (2, 128)
        for from_memory in (False, True)
    ]
