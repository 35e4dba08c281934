"""Counts between ranks for a static receive: every rank tells all how many rows it has, and every rank plans alike.

    T tokens   K num_topk   E num_experts   E_local experts here   R num_ranks

    card: signature, first bad position, its id, where the source's block has rows and weights, as offsets in the
    region of all ranks that the block lies in: int64 | at 64 bytes: counts [E + R] int32

Cards lie in mailboxes `[num_windows, R, card_bytes]`, by call and source, as messages do in `captured_messages`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.eager import Form
from moecomm.kernels.triton.captured_messages import window_of
from moecomm.kernels.triton.captured_plan import (
    Arrived,
    Scratch,
    place_block,
    plan_tile,
    report_overflow,
    settle_block,
)
from moecomm.kernels.triton.captured_send import end_send
from moecomm.kernels.triton.captured_state import BAD_ID, MISMATCH, Control, Operation, report_fault
from moecomm.kernels.triton.compile_case import CompileCase
from moecomm.kernels.triton.lanes import acquire_lanes, unless_failed
from moecomm.kernels.triton.runtime import launch, num_blocks

__all__ = ["NOWHERE", "announce", "card_bytes", "compile_cases", "find_bad", "plan_announced"]

NOWHERE = (1 << 62) - 1
"""The first bad position where there is none."""

_NOWHERE = tl.constexpr(NOWHERE)
_HEADER = tl.constexpr(64)
_IDS = 512
_COLUMNS = 128


def card_bytes(num_experts: int, num_ranks: int) -> int:
    """What one card takes."""
    return 64 + -(-(num_experts + num_ranks) * 4 // 64) * 64


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
        *("card_bytes", "num_windows", "signature", "rows_at", "values_at", "rank", "num_ranks", "num_columns", "slot"),
    ],
    do_not_specialize_on_alignment=[
        *("counts", "ids", "first_bad", "mailboxes", "begun", "ticket", "arrivals", "boards", "status"),
    ],
)
def announce_kernel(
    counts: tl.tensor,
    ids: tl.tensor,
    first_bad: tl.tensor,
    mailboxes: tl.tensor,
    card_bytes: tl.int64,
    num_windows: tl.int64,
    signature: tl.int64,
    rows_at: tl.int64,
    values_at: tl.int64,
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
        mailboxes: `[R]` int64, address of each rank's here.
    """
    num_boards = unless_failed(status, num_ranks)
    number = tl.load(begun) + 1
    if num_boards > 0:
        mine = window_of(rank * card_bytes, card_bytes, num_windows, num_ranks, number)
        card = tl.load(mailboxes + tl.program_id(0)) + mine
        header = card.to(tl.pointer_type(tl.int64))
        where = tl.load(first_bad)
        tl.store(header, tl.cast(signature, tl.int64))
        tl.store(header + 1, where)
        tl.store(header + 2, tl.load(ids + where, mask=where < _NOWHERE, other=0).to(tl.int64))
        tl.store(header + 3, tl.cast(rows_at, tl.int64))
        tl.store(header + 4, tl.cast(values_at, tl.int64))
        for first in range(0, num_columns, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            count = tl.load(counts + column, mask=column < num_columns)
            tl.store((card + _HEADER).to(tl.pointer_type(tl.int32)) + column, count, mask=column < num_columns)
    if end_send(arrivals, boards, num_boards, slot * num_ranks + rank, begun, ticket, number, RANKS):
        tl.store(first_bad, tl.cast(_NOWHERE, tl.int64))


@triton.jit
def _sum_cards(
    cards: tl.int64,
    card_bytes: tl.int64,
    rank: tl.int32,
    num_ranks: tl.int32,
    num_experts: tl.int32,
    counts: tl.tensor,
    totals: tl.tensor,
    bases: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """Copies counts, and writes their sums over all sources, and to `bases` those over the sources before mine."""
    num_columns = num_experts + num_ranks
    for first in range(0, num_columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        is_column = column < num_columns
        total = tl.zeros((COLUMNS,), dtype=tl.int32)
        before = tl.zeros((COLUMNS,), dtype=tl.int32)
        for source in range(0, num_ranks):
            card = (cards + source * card_bytes + _HEADER).to(tl.pointer_type(tl.int32))
            count = tl.load(card + column, mask=is_column, other=0)
            tl.store(counts + tl.cast(source, tl.int64) * num_columns + column, count, mask=is_column)
            before = tl.where(source < rank, before + count, before)
            total += count
        tl.store(totals + column, total, mask=is_column)
        tl.store(bases + column, before.to(tl.int64), mask=column < num_experts)
    tl.debug_barrier()


@triton.jit(
    do_not_specialize=[
        *("board", "slot", "num_ranks", "timeout_ns", "mailbox", "card_bytes", "num_windows", "signature"),
        *("num_experts", "rank", "num_topk", "num_local", "capacity", "alignment", "num_rows"),
    ],
    do_not_specialize_on_alignment=["ticket", "status", "fault", "arrivals", "used", "regions", "rows", "values"],
)
def plan_announced_kernel(
    board: tl.int64,
    slot: tl.int64,
    ticket: tl.tensor,
    num_ranks: tl.int32,
    status: tl.tensor,
    timeout_ns: tl.int64,
    fault: tl.tensor,
    mailbox: tl.int64,
    card_bytes: tl.int64,
    num_windows: tl.int64,
    signature: tl.int64,
    expert_rank: tl.tensor,
    expert_local: tl.tensor,
    num_experts: tl.int32,
    rank: tl.int32,
    num_local: tl.int32,
    capacity: tl.int64,
    alignment: tl.int32,
    num_rows: tl.int64,
    regions: tl.tensor,
    rows: tl.tensor,
    values: tl.tensor,
    bases: tl.tensor,
    totals: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    arrivals: tl.tensor,
    counts: tl.tensor,
    num_tokens_per_expert: tl.tensor,
    offsets: tl.tensor,
    tokens_per_expert: tl.tensor,
    first_rows: tl.tensor,
    used: tl.tensor,
    spans: tl.tensor,
    COLUMNS: tl.constexpr,
    ALL_RANKS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    """One program: waits for all cards and plans from them, or reports why it cannot.

    Arguments:
        mailbox: address of mine.
        regions: `[R]` int64, address of each rank's region here.
        rows, values: `[R]` int64, overwritten: addresses here of what each rank's card names.
        bases: `[E]` int64: the row, at its rank, of my first route to each expert.
    """
    number = tl.load(ticket)
    num_behind = acquire_lanes(board, slot, number, num_ranks, status, timeout_ns, ALL_RANKS)
    # Whether an earlier call has failed: this one program is all that waits, and then it has not.
    num_ready = tl.where(num_behind == 0, unless_failed(status, num_ranks), 0)
    if num_ready > 0:
        cards = window_of(mailbox, card_bytes, num_windows, num_ranks, number)
        source = tl.arange(0, ALL_RANKS)
        header = (cards + source * card_bytes).to(tl.pointer_type(tl.int64))
        is_rank = source < num_ranks
        is_alike = tl.load(header, mask=is_rank, other=0) == signature
        stranger = tl.min(tl.where(is_rank & (~is_alike), source, num_ranks), axis=0)
        where = tl.load(header + 1, mask=is_rank, other=_NOWHERE)
        wrong = tl.min(tl.where(is_rank & (where < _NOWHERE), source, num_ranks), axis=0)
        # Without a plan nothing goes there, so they need not be right.
        region = tl.load(regions + source, mask=is_rank, other=0)
        tl.store(rows + source, region + tl.load(header + 3, mask=is_rank, other=0), mask=is_rank)
        tl.store(values + source, region + tl.load(header + 4, mask=is_rank, other=0), mask=is_rank)
        _sum_cards(cards, card_bytes, rank, num_ranks, num_experts, counts, totals, bases, COLUMNS)
        worst = place_block(
            totals,
            expert_rank,
            expert_local,
            num_experts,
            capacity,
            alignment,
            num_rows,
            starts,
            ends,
            ALL_RANKS,
            EXPERTS,
        )
        if stranger < num_ranks:
            report_fault(status, fault, slot, number, stranger, 0, 0, MISMATCH)
        elif wrong < num_ranks:
            card = (cards + wrong * card_bytes).to(tl.pointer_type(tl.int64))
            report_fault(status, fault, slot, number, wrong, tl.load(card + 1), tl.load(card + 2), BAD_ID)
        elif worst < num_experts:
            report_overflow(
                status,
                fault,
                slot,
                number,
                totals,
                expert_rank,
                num_experts,
                ends,
                capacity,
                num_rows,
                EXPERTS,
            )
        else:
            for first in range(0, num_experts, EXPERTS):
                e = first + tl.arange(0, EXPERTS)
                start = tl.load(starts + e, mask=e < num_experts, other=0)
                before = tl.load(bases + e, mask=e < num_experts, other=0)
                tl.store(bases + e, start + before, mask=e < num_experts)
            settle_block(
                totals,
                expert_rank,
                expert_local,
                num_experts,
                rank,
                num_local,
                capacity,
                starts,
                ends,
                num_tokens_per_expert,
                offsets,
                tokens_per_expert,
                first_rows,
                used,
                spans,
                EXPERTS,
            )


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
    mailboxes: Tensor,
    signature: int,
    places: tuple[int, int],
) -> None:
    """Begins a call: sends every rank my card. `places`: offsets of my rows and weights in the region of all ranks."""
    num_ranks = control.num_ranks
    launch(
        announce_kernel,
        num_ranks,
        counts.device,
        *(counts, ids, first_bad, mailboxes, card_bytes(counts.numel() - num_ranks, num_ranks), control.num_windows),
        *(signature, *places, control.rank, num_ranks, counts.numel(), operation.begun, ticket, operation.arrivals),
        *(control.boards, operation.slot, control.status),
        COLUMNS=_COLUMNS,
        RANKS=triton.next_power_of_2(num_ranks),
    )


def plan_announced(
    control: Control,
    slot: int,
    ticket: Tensor,
    mailbox: int,
    signature: int,
    experts: tuple[Tensor, Tensor],
    form: Form,
    places: tuple[Tensor, Tensor, Tensor],
    bases: Tensor,
    scratch: Scratch,
    arrived: Arrived,
) -> None:
    """Waits for all cards and plans.

    Arguments:
        experts: the rank of each, its index there.
        places: `[R]` int64 each: addresses of regions; to be overwritten with those of rows and weights.
    """
    num_ranks, num_experts = control.num_ranks, bases.numel()
    tile = plan_tile(num_ranks)
    launch(
        plan_announced_kernel,
        1,
        bases.device,
        *(control.board, slot, ticket, num_ranks, control.status, control.timeout_ns, control.fault),
        *(mailbox, card_bytes(num_experts, num_ranks), control.num_windows, signature, *experts),
        *(num_experts, control.rank, arrived.num_tokens_per_expert.numel()),
        *(form.capacity, form.alignment, form.num_rows, *places, bases, *scratch, *arrived),
        COLUMNS=_COLUMNS,
        ALL_RANKS=triton.next_power_of_2(num_ranks),
        EXPERTS=tile.experts,
        num_warps=tile.num_warps,
    )


def compile_cases() -> list[CompileCase]:
    """Ids of both widths; some ranks and many."""
    kept = ("tokens_per_expert", "first_rows", "used", "spans", "bases", "starts", "ends")
    wide = (
        *kept,
        "mailboxes",
        "regions",
        "rows",
        "values",
        "begun",
        "ticket",
        "boards",
        "status",
        "first_bad",
        "fault",
    )
    narrow = ("counts", "arrivals", "expert_rank", "expert_local", "totals", "num_tokens_per_expert", "offsets")
    ints = ("num_experts", "rank", "num_ranks", "num_columns", "num_local", "alignment")
    types = {**dict.fromkeys(wide, "*i64"), **dict.fromkeys(narrow, "*i32"), **dict.fromkeys(ints, "i32")}
    cases = []
    for ids, ranks in (("*i32", 8), ("*i64", 128)):
        forms = {
            f"find_bad {ids}": (find_bad_kernel, {"IDS": _IDS}),
            f"announce {ids}, {ranks} ranks": (announce_kernel, {"COLUMNS": _COLUMNS, "RANKS": ranks}),
            f"plan_announced {ranks} ranks": (
                plan_announced_kernel,
                {"COLUMNS": _COLUMNS, "ALL_RANKS": ranks, "EXPERTS": plan_tile(ranks).experts},
            ),
        }
        for name, (kernel, constants) in forms.items():
            known = {**types, "ids": ids, **dict.fromkeys(constants, "constexpr")}
            signature = {argument: known.get(argument, "i64") for argument in kernel.arg_names}
            num_warps = plan_tile(ranks).num_warps if kernel is plan_announced_kernel else 4
            case = CompileCase(name=name, kernel=kernel, signature=signature, constexprs=constants, num_warps=num_warps)
            cases.append(case)
    return cases
