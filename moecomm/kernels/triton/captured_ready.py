"""Where rows of a combine lie, from rank to rank: they are read in place, and may change when everybody has read them.

    R ranks

    card: signature, where the source's planes are, as offsets in the region of all ranks: int64, in 64 bytes

Planes are rows, and numbers that come home beside them.

Cards lie in mailboxes `[num_windows, R, 64]`, by call and source, as those of `captured_announce` do.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.triton.captured_messages import window_of
from moecomm.kernels.triton.captured_send import end_send
from moecomm.kernels.triton.captured_state import (
    CHANGED,
    MISMATCH,
    Control,
    Operation,
    changed_signature,
    find_rank,
    report_fault,
)
from moecomm.kernels.triton.compile_case import LISTED_RANKS, NUMBERS_OF_RANKS, CompileCase
from moecomm.kernels.triton.lanes import acquire_lanes, unless_failed
from moecomm.kernels.triton.runtime import launch

__all__ = ["NUM_PLANES", "READY_BYTES", "compile_cases", "find_places", "send_places"]

READY_BYTES = 64
"""What one card takes."""

NUM_PLANES = 2
"""That a card names."""

_BYTES = tl.constexpr(READY_BYTES)
_NUM_PLANES = tl.constexpr(NUM_PLANES)


@triton.jit(
    do_not_specialize=["rows_at", "values_at", "signature", "num_windows", "rank", "num_ranks", "slot"],
    do_not_specialize_on_alignment=["changed", "mailboxes", "begun", "ticket", "arrivals", "boards", "status"],
)
def send_places_kernel(
    rows_at: tl.int64,
    values_at: tl.int64,
    signature: tl.int64,
    changed: tl.tensor,
    mailboxes: tl.tensor,
    num_windows: tl.int64,
    rank: tl.int32,
    num_ranks: tl.int32,
    begun: tl.tensor,
    ticket: tl.tensor,
    arrivals: tl.tensor,
    boards: tl.tensor,
    slot: tl.int64,
    status: tl.tensor,
    RANKS: tl.constexpr,
) -> None:
    """One program: writes my card for every rank and signals.

    Arguments:
        rows_at, values_at: offsets of my planes in the region of all ranks.
        changed: one int64: whether a recompute has routed otherwise.
        mailboxes: `[R]` int64, address of each rank's here.
    """
    num_boards = unless_failed(status, num_ranks)
    number = tl.load(begun) + 1
    peer = tl.arange(0, RANKS)
    mine = window_of(rank * tl.cast(_BYTES, tl.int64), _BYTES, num_windows, num_ranks, number)
    card = (tl.load(mailboxes + peer, mask=peer < num_boards, other=0) + mine).to(tl.pointer_type(tl.int64))
    said = tl.where(tl.load(changed) != 0, changed_signature(signature), tl.cast(signature, tl.int64))
    tl.store(card, tl.full((RANKS,), 0, tl.int64) + said, mask=peer < num_boards)
    tl.store(card + 1, tl.full((RANKS,), 0, tl.int64) + rows_at, mask=peer < num_boards)
    tl.store(card + 2, tl.full((RANKS,), 0, tl.int64) + values_at, mask=peer < num_boards)
    end_send(arrivals, boards, num_boards, slot * num_ranks + rank, begun, ticket, number, RANKS)


@triton.jit(
    do_not_specialize=["board", "slot", "num_ranks", "timeout_ns", "mailbox", "num_windows", "signature"],
    do_not_specialize_on_alignment=["ticket", "status", "fault", "regions", "addresses"],
)
def find_places_kernel(
    board: tl.int64,
    slot: tl.int64,
    ticket: tl.tensor,
    num_ranks: tl.int32,
    status: tl.tensor,
    timeout_ns: tl.int64,
    fault: tl.tensor,
    mailbox: tl.int64,
    num_windows: tl.int64,
    signature: tl.int64,
    regions: tl.tensor,
    addresses: tl.tensor,
    RANKS: tl.constexpr,
) -> None:
    """One program: waits for all cards and writes where everybody's planes are, or reports why they are not read.

    Arguments:
        mailbox: address of mine.
        regions: `[R]` int64, address of each rank's region here.
        addresses: `[NUM_PLANES, R]` int64, overwritten.
    """
    number = tl.load(ticket)
    num_behind = acquire_lanes(board, slot, number, num_ranks, status, timeout_ns, RANKS)
    # Whether an earlier call has failed: this one program is all that waits, and then it has not.
    num_ready = tl.where(num_behind == 0, unless_failed(status, num_ranks), 0)
    if num_ready > 0:
        cards = window_of(mailbox, _BYTES, num_windows, num_ranks, number)
        source = tl.arange(0, RANKS)
        is_rank = source < num_ranks
        card = (cards + source * _BYTES).to(tl.pointer_type(tl.int64))
        said = tl.load(card, mask=is_rank, other=0)
        stranger = find_rank(is_rank & (said != signature) & (said != changed_signature(signature)), source, num_ranks)
        changer = find_rank(is_rank & (said == changed_signature(signature)), source, num_ranks)
        if stranger < num_ranks:
            report_fault(status, fault, slot, number, stranger, 0, 0, MISMATCH)
        elif changer < num_ranks:
            report_fault(status, fault, slot, number, changer, 0, 0, CHANGED)
        else:
            region = tl.load(regions + source, mask=is_rank, other=0)
            for plane in tl.static_range(_NUM_PLANES):
                place = region + tl.load(card + 1 + plane, mask=is_rank, other=0)
                tl.store(addresses + plane * num_ranks + source, place, mask=is_rank)


def send_places(
    control: Control,
    operation: Operation,
    ticket: Tensor,
    places: tuple[int, int],
    mailboxes: Tensor,
    signature: int,
    changed: Tensor,
) -> None:
    """Begins a call: tells every rank that my planes are ready at these offsets in the region of all ranks."""
    launch(
        send_places_kernel,
        1,
        ticket.device,
        *(*places, signature, changed, mailboxes, control.num_windows, control.rank, control.num_ranks),
        *(operation.begun, ticket, operation.arrivals, control.boards, operation.slot, control.status),
        RANKS=triton.next_power_of_2(control.num_ranks),
        num_warps=1,
    )


def find_places(
    control: Control, slot: int, ticket: Tensor, mailbox: int, signature: int, regions: Tensor, addresses: Tensor
) -> None:
    """Waits for all cards; `addresses` `[NUM_PLANES, R]` int64 becomes where everybody's planes are."""
    launch(
        find_places_kernel,
        1,
        ticket.device,
        *(control.board, slot, ticket, control.num_ranks, control.status, control.timeout_ns, control.fault),
        *(mailbox, control.num_windows, signature, regions, addresses),
        RANKS=triton.next_power_of_2(control.num_ranks),
        num_warps=1,
    )


def compile_cases() -> list[CompileCase]:
    """One of each."""
    words = ("changed", "mailboxes", "begun", "ticket", "boards", "status", "fault", "regions", "addresses")
    types = {**dict.fromkeys(words, "*i64"), "arrivals": "*i32", "rank": "i32", "num_ranks": "i32"}
    kernels: dict[str, Any] = {"send_places": send_places_kernel, "find_places": find_places_kernel}
    return [
        CompileCase(
            name=f"{name} {ranks} ranks",
            kernel=kernel,
            signature={argument: {**types, "RANKS": "constexpr"}.get(argument, "i64") for argument in kernel.arg_names},
            constexprs={"RANKS": ranks},
            num_warps=1,
            is_listed=ranks in LISTED_RANKS,
        )
        for name, kernel in kernels.items()
        for ranks in NUMBERS_OF_RANKS
    ]
