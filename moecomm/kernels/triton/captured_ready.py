"""Where rows of a combine lie, from rank to rank: they are read in place, and may change when everybody has read them.

    R ranks

    card: signature, where the source's rows are, as an offset in the region of all ranks: int64, in 64 bytes

Cards lie in mailboxes `[num_windows, R, 64]`, by call and source, as those of `captured_announce` do.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.triton.captured_messages import window_of
from moecomm.kernels.triton.captured_send import end_send
from moecomm.kernels.triton.captured_state import MISMATCH, Control, Operation, report_fault
from moecomm.kernels.triton.compile_case import CompileCase
from moecomm.kernels.triton.lanes import acquire_lanes, unless_failed
from moecomm.kernels.triton.runtime import launch

__all__ = ["READY_BYTES", "compile_cases", "find_places", "send_place"]

READY_BYTES = 64
"""What one card takes."""

_BYTES = tl.constexpr(READY_BYTES)


@triton.jit(
    do_not_specialize=["place", "signature", "num_windows", "rank", "num_ranks", "slot"],
    do_not_specialize_on_alignment=["mailboxes", "begun", "ticket", "arrivals", "boards", "status"],
)
def send_place_kernel(
    place: tl.int64,
    signature: tl.int64,
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
        place: offset of my rows in the region of all ranks.
        mailboxes: `[R]` int64, address of each rank's here.
    """
    num_boards = unless_failed(status, num_ranks)
    number = tl.load(begun) + 1
    peer = tl.arange(0, RANKS)
    mine = window_of(rank * tl.cast(_BYTES, tl.int64), _BYTES, num_windows, num_ranks, number)
    card = (tl.load(mailboxes + peer, mask=peer < num_boards, other=0) + mine).to(tl.pointer_type(tl.int64))
    tl.store(card, tl.full((RANKS,), 0, tl.int64) + signature, mask=peer < num_boards)
    tl.store(card + 1, tl.full((RANKS,), 0, tl.int64) + place, mask=peer < num_boards)
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
    """One program: waits for all cards and writes where everybody's rows are, or reports that one is of another call.

    Arguments:
        mailbox: address of mine.
        regions: `[R]` int64, address of each rank's region here.
        addresses: `[R]` int64, overwritten.
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
        is_alike = tl.load(card, mask=is_rank, other=0) == signature
        stranger = tl.min(tl.where(is_rank & (~is_alike), source, num_ranks), axis=0)
        if stranger < num_ranks:
            report_fault(status, fault, slot, number, stranger, 0, 0, MISMATCH)
        else:
            place = tl.load(regions + source, mask=is_rank, other=0) + tl.load(card + 1, mask=is_rank, other=0)
            tl.store(addresses + source, place, mask=is_rank)


def send_place(
    control: Control, operation: Operation, ticket: Tensor, place: int, mailboxes: Tensor, signature: int
) -> None:
    """Begins a call: tells every rank that my rows are ready at this offset in the region of all ranks."""
    launch(
        send_place_kernel,
        1,
        ticket.device,
        *(place, signature, mailboxes, control.num_windows, control.rank, control.num_ranks),
        *(operation.begun, ticket, operation.arrivals, control.boards, operation.slot, control.status),
        RANKS=triton.next_power_of_2(control.num_ranks),
        num_warps=1,
    )


def find_places(
    control: Control, slot: int, ticket: Tensor, mailbox: int, signature: int, regions: Tensor, addresses: Tensor
) -> None:
    """Waits for all cards; `addresses` `[R]` int64 becomes where everybody's rows are."""
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
    """Some ranks and many."""
    words = ("mailboxes", "begun", "ticket", "boards", "status", "fault", "regions", "addresses")
    types = {**dict.fromkeys(words, "*i64"), "arrivals": "*i32", "rank": "i32", "num_ranks": "i32"}
    kernels: dict[str, Any] = {"send_place": send_place_kernel, "find_places": find_places_kernel}
    return [
        CompileCase(
            name=f"{name} {ranks} ranks",
            kernel=kernel,
            signature={argument: {**types, "RANKS": "constexpr"}.get(argument, "i64") for argument in kernel.arg_names},
            constexprs={"RANKS": ranks},
            num_warps=1,
        )
        for name, kernel in kernels.items()
        for ranks in (8, 128)
    ]
