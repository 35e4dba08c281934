"""Counts between ranks for a static receive: every rank tells all how many rows it has, and where its block is.

    E num_experts   R num_ranks

    card: signature, first bad position, its id, where the source's block has each plane, as offsets in the region of
    all ranks that the block lies in: int64 | at 64 bytes: counts [E + R] int32

Planes are rows, weights, and (flat) local ids.

Cards lie in mailboxes `[num_windows, R, card_bytes]`, by call and source, as messages do in `captured_messages`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.triton.captured_messages import window_of
from moecomm.kernels.triton.captured_send import end_send
from moecomm.kernels.triton.captured_state import Control, Operation, changed_signature
from moecomm.kernels.triton.compile_case import NUMBERS_OF_RANKS, CompileCase, varied
from moecomm.kernels.triton.lanes import unless_failed
from moecomm.kernels.triton.runtime import launch, num_blocks

__all__ = ["HEADER_BYTES", "NOWHERE", "NUM_PLANES", "PLACES", "announce", "card_bytes", "compile_cases", "find_bad"]

HEADER_BYTES = 64
"""What stands before the counts of a card."""

PLACES = 3
"""The word of a header that says where the first plane is; those of the others follow."""

NUM_PLANES = 3
"""Of a block."""

NOWHERE = (1 << 62) - 1
"""The first bad position where there is none."""

_NOWHERE = tl.constexpr(NOWHERE)
_HEADER = tl.constexpr(HEADER_BYTES)
_PLACES = tl.constexpr(PLACES)
_IDS = 512
_COLUMNS = 128


def card_bytes(num_experts: int, num_ranks: int) -> int:
    """What one card takes."""
    return HEADER_BYTES + -(-(num_experts + num_ranks) * 4 // 64) * 64


@triton.jit(do_not_specialize=["num_ids", "num_experts"], do_not_specialize_on_alignment=["ids", "first_bad"])
def find_bad_kernel(
    ids: tl.tensor, num_ids: tl.int64, num_experts: tl.int32, first_bad: tl.tensor, IDS: tl.constexpr
) -> None:
    """Makes `first_bad` the first position of an id that is none, if that is less."""
    position = tl.program_id(0).to(tl.int64) * IDS + tl.arange(0, IDS)
    is_id = position < num_ids
    id = tl.load(ids + position, mask=is_id, other=-1).to(tl.int64)
    where = tl.min(tl.where(is_id & ((id < -1) | (id >= num_experts)), position, _NOWHERE), axis=0)
    if where < _NOWHERE:
        tl.atomic_min(first_bad, where, sem="relaxed", scope="gpu")


@triton.jit(
    do_not_specialize=[
        *(
            "card_bytes",
            "num_windows",
            "signature",
            "rows_at",
            "values_at",
            "ids_at",
            "rank",
            "num_ranks",
            "num_columns",
            "slot",
        ),
    ],
    do_not_specialize_on_alignment=[
        *("counts", "ids", "first_bad", "changed", "mailboxes", "begun", "ticket", "arrivals", "boards", "status"),
    ],
)
def announce_kernel(
    counts: tl.tensor,
    ids: tl.tensor,
    first_bad: tl.tensor,
    changed: tl.tensor,
    mailboxes: tl.tensor,
    card_bytes: tl.int64,
    num_windows: tl.int64,
    signature: tl.int64,
    rows_at: tl.int64,
    values_at: tl.int64,
    ids_at: tl.int64,
    rank: tl.int32,
    num_ranks: tl.int32,
    num_columns: tl.int32,
    begun: tl.tensor,
    ticket: tl.tensor,
    arrivals: tl.tensor,
    boards: tl.tensor,
    slot: tl.int64,
    status: tl.tensor,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """Program r writes my card for rank r; the last one signals.

    Arguments:
        counts: `[E + R]` int32: my routes to each expert, my tokens with a choice at each rank.
        first_bad: one int64; becomes `NOWHERE` again.
        changed: one int64: whether a recompute has routed otherwise.
        mailboxes: `[R]` int64, address of each rank's here.
    """
    num_boards = unless_failed(status, num_ranks)
    number = tl.load(begun) + 1
    if num_boards > 0:
        mine = window_of(rank * card_bytes, card_bytes, num_windows, num_ranks, number)
        card = tl.load(mailboxes + tl.program_id(0)) + mine
        header = card.to(tl.pointer_type(tl.int64))
        where = tl.load(first_bad)
        tl.store(header, tl.where(tl.load(changed) != 0, changed_signature(signature), tl.cast(signature, tl.int64)))
        tl.store(header + 1, where)
        tl.store(header + 2, tl.load(ids + where, mask=where < _NOWHERE, other=0).to(tl.int64))
        tl.store(header + _PLACES, tl.cast(rows_at, tl.int64))
        tl.store(header + _PLACES + 1, tl.cast(values_at, tl.int64))
        tl.store(header + _PLACES + 2, tl.cast(ids_at, tl.int64))
        for first in range(0, num_columns, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            count = tl.load(counts + column, mask=column < num_columns)
            tl.store((card + _HEADER).to(tl.pointer_type(tl.int32)) + column, count, mask=column < num_columns)
    if end_send(arrivals, boards, num_boards, slot * num_ranks + rank, begun, ticket, number, RANKS):
        tl.store(first_bad, tl.cast(_NOWHERE, tl.int64))


def find_bad(ids: Tensor, num_experts: int, first_bad: Tensor) -> None:
    """Makes `first_bad`, one int64, the first position of an id that is none, if that is less."""
    args = (ids, ids.numel(), num_experts, first_bad)
    launch(find_bad_kernel, num_blocks(ids.numel(), _IDS), ids.device, *args, IDS=_IDS)


def announce(
    control: Control,
    operation: Operation,
    ticket: Tensor,
    counts: Tensor,
    ids: Tensor,
    first_bad: Tensor,
    changed: Tensor,
    mailboxes: Tensor,
    signature: int,
    places: tuple[int, int, int],
) -> None:
    """Begins a call: sends every rank my card. `places`: offsets of my planes in the region of all ranks."""
    num_ranks = control.num_ranks
    launch(
        announce_kernel,
        num_ranks,
        counts.device,
        *(counts, ids, first_bad, changed, mailboxes, card_bytes(counts.numel() - num_ranks, num_ranks)),
        control.num_windows,
        *(signature, *places, control.rank, num_ranks, counts.numel(), operation.begun, ticket, operation.arrivals),
        *(control.boards, operation.slot, control.status),
        COLUMNS=_COLUMNS,
        RANKS=triton.next_power_of_2(num_ranks),
    )


def compile_cases() -> list[CompileCase]:
    """Ids of both widths; some ranks and many."""
    words = ("mailboxes", "begun", "ticket", "boards", "status", "first_bad", "changed")
    types = {**dict.fromkeys(words, "*i64"), **dict.fromkeys(("counts", "arrivals"), "*i32")}
    types |= dict.fromkeys(("num_experts", "rank", "num_ranks", "num_columns"), "i32")
    cases: list[CompileCase] = []
    for ids, ranks in (("*i32", 8), ("*i64", 128)):
        forms = {
            f"find_bad {ids}": (find_bad_kernel, {"IDS": _IDS}),
            f"announce {ids}, {ranks} ranks": (announce_kernel, {"COLUMNS": _COLUMNS, "RANKS": ranks}),
        }
        for name, (kernel, constants) in forms.items():
            known = {**types, "ids": ids, **dict.fromkeys(constants, "constexpr")}
            signature = {argument: known.get(argument, "i64") for argument in kernel.arg_names}
            cases.append(CompileCase(name=name, kernel=kernel, signature=signature, constexprs=constants))
    return cases + varied(cases[-1], ({"RANKS": ranks} for ranks in NUMBERS_OF_RANKS))
