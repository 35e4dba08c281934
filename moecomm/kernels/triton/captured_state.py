"""What captured calls keep in device memory between each other, and the errors that the host reads there.

    R ranks   slot: an operation of which calls are counted   lane: one counter, of one slot and one source

Two kinds of failure stop all later kernels of a rank, in the order of its stream: a wait that has failed (`lanes`), and
a fault that every rank finds by itself in what has arrived, in the same call, so that all stop at the same place. Both
are in the first word of the status, which each kernel reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moecomm.errors import CallMismatch, CapacityExceeded, PeerTimeout, RoutingChanged
from moecomm.kernels.captured import FOUND_BY_ALL
from moecomm.kernels.triton.lanes import EXPECTED, FAILED
from moecomm.kernels.triton.signals import make_status, raise_if_behind

__all__ = [
    "BAD_ID",
    "CHANGED",
    "MISMATCH",
    "NUM_SLOTS",
    "OPERATIONS",
    "OVERFLOW",
    "Control",
    "Operation",
    "changed_signature",
    "check_control",
    "failure_of",
    "find_rank",
    "make_control",
    "report_fault",
    "windows_for",
]

OPERATIONS = ("dispatch", "combine", "announcement", "push", "readiness", "release")
NUM_SLOTS = len(OPERATIONS)
"""Slots that a board needs for captured calls."""

# The first word of a status where no wait has failed.
OVERFLOW = tl.constexpr(-1)
BAD_ID = tl.constexpr(-2)
MISMATCH = tl.constexpr(-3)
CHANGED = tl.constexpr(-4)
_CHANGED_BIT = tl.constexpr(1 << 32)
_NUM_WORDS = 5


class Operation(NamedTuple):
    """Calls of one kind.

    Attributes:
        slot: theirs on every board.
        begun: one int64: how many have begun.
        arrivals: one int32 for the programs that begin one.
    """

    slot: int
    begun: Tensor
    arrivals: Tensor


class Control(NamedTuple):
    """The same for all calls.

    Attributes:
        rank: mine.
        board: address of my board.
        boards: `[R]` int64, address of each rank's board here.
        status: as in `lanes`, with faults.
        fault: `[5]` int64: slot, ticket, then by kind: overflow: index, rows needed, rows there are; bad id: source,
            t * K + k, id; mismatch, changed: source.
        timeout_ns: of a wait.
        num_windows: calls whose messages are kept, see `windows_for`.
    """

    rank: int
    board: int
    boards: Tensor
    status: Tensor
    fault: Tensor
    timeout_ns: int
    num_windows: int

    @property
    def num_ranks(self) -> int:
        return self.boards.numel()


def windows_for(max_in_flight: int) -> int:
    """Calls of an operation whose messages are kept: twice as many as may be begun, or the next power of two."""
    return int(triton.next_power_of_2(2 * max_in_flight))


def make_control(
    rank: int, boards: list[int], device: torch.device, timeout_ns: int, num_windows: int
) -> tuple[Control, list[Operation]]:
    """New state, and the operations in the order of `OPERATIONS`."""
    num_ranks = len(boards)
    control = Control(
        rank,
        boards[rank],
        torch.tensor(boards, dtype=torch.int64, device=device),
        make_status(num_ranks, device),
        torch.zeros(_NUM_WORDS, dtype=torch.int64, device=device),
        timeout_ns,
        num_windows,
    )
    operations = [
        Operation(slot, *(torch.zeros(1, dtype=dtype, device=device) for dtype in (torch.int64, torch.int32)))
        for slot in range(NUM_SLOTS)
    ]
    return control, operations


@triton.jit
def changed_signature(signature: tl.int64) -> tl.tensor:
    """What a card says for its signature of 31 bits if a recompute has routed otherwise than the forward."""
    return tl.cast(signature, tl.int64) + _CHANGED_BIT


@triton.jit
def find_rank(is_it: tl.tensor, source: tl.tensor, num_ranks: tl.int32) -> tl.tensor:
    """The first rank of which something is true, or num_ranks."""
    return tl.min(tl.where(is_it, source, num_ranks), axis=0)


@triton.jit
def report_fault(
    status: tl.tensor,
    fault: tl.tensor,
    slot: tl.int64,
    ticket: tl.int64,
    first: tl.int64,
    second: tl.int64,
    third: tl.int64,
    KIND: tl.constexpr,
) -> None:
    """Stops the kernels behind this one. For one program, while no other waits."""
    tl.store(fault, slot)
    tl.store(fault + 1, ticket)
    tl.store(fault + 2, first)
    tl.store(fault + 3, second)
    tl.store(fault + 4, third)
    tl.store(status + FAILED, KIND)


def failure_of(
    control: Control, *, num_topk: int, describe: Callable[[int], str] = lambda rank: f"rank {rank}"
) -> Exception | None:
    """Waits for the work given so far; gives what has stopped it, see `check_control`."""
    words: list[int] = control.status.tolist()
    kind = words[FAILED.value]
    if kind == 0:
        return None
    if kind > 0:
        try:
            raise_if_behind(control.status, f"{OPERATIONS[kind - 1]} #{words[EXPECTED.value] - 1}", describe=describe)
        except PeerTimeout as error:
            return error
    slot, ticket, first, second, third = control.fault.tolist()
    operation = f"{OPERATIONS[slot]} #{ticket - 1}"
    if kind == MISMATCH.value:
        return CallMismatch(
            f"{operation}: what {describe(first)} has sent is of another form than what rank {control.rank} expects; "
            "all ranks must give the same dtype, num_topk, layout, expert_alignment and capacity, weights or none, and "
            "handles of the same dispatch",
            operation=operation,
            peers=(first,),
        )
    if kind == CHANGED.value:
        return RoutingChanged(
            f"{operation}: under activation checkpointing a recompute of {describe(first)} has routed otherwise than "
            "the forward: topk_idx differs, so gradients would be wrong, and none are computed from here on"
        )
    if kind == OVERFLOW.value:
        what, remedy = "rank", "Give a larger capacity, or none"
        if OPERATIONS[slot] == "dispatch":  # of low latency: there is room for every token once
            what, remedy = (
                "expert (slab) or rank",
                "Tokens name experts of theirs more than once: remove the duplicates",
            )
        return CapacityExceeded(
            f"{operation}: {second} rows for {what} {first}, but there is room for {third}. {remedy}"
        )
    t, k = divmod(second, num_topk)
    return ValueError(f"{operation}: topk_idx[{t}, {k}] = {third} of {describe(first)} is not an expert")


def check_control(
    control: Control, *, num_topk: int, describe: Callable[[int], str] = lambda rank: f"rank {rank}"
) -> None:
    """Waits for the work given so far and raises what has stopped it; faults, found everywhere, are forgotten then.

    Raises:
        PeerTimeout: a wait has failed; this lasts.
        CapacityExceeded: rows did not fit.
        ValueError: an id was none.
        CallMismatch: ranks made calls of different forms.
        RoutingChanged: a recompute has routed otherwise than its forward.
    """
    failure = failure_of(control, num_topk=num_topk, describe=describe)
    if failure is None:
        return
    if isinstance(failure, FOUND_BY_ALL):
        control.status[FAILED.value].zero_()
    raise failure
