"""Plans from the cards of all ranks, which say how many rows each has for whom; see captured_announce.py.

E num_experts   R num_ranks   G groups of all ranks
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.eager import Form
from moecomm.kernels.triton.captured_announce import HEADER_BYTES, NOWHERE, NUM_PLANES, PLACES, card_bytes
from moecomm.kernels.triton.captured_groups import (
    Arrived,
    Groups,
    Scratch,
    count_arrived,
    place_block,
    plan_tile,
    report_overflow,
    settle_block,
)
from moecomm.kernels.triton.captured_messages import window_of
from moecomm.kernels.triton.captured_state import (
    BAD_ID,
    CHANGED,
    MISMATCH,
    Control,
    changed_signature,
    find_rank,
    report_fault,
)
from moecomm.kernels.triton.compile_case import NUMBERS_OF_RANKS, CompileCase
from moecomm.kernels.triton.lanes import acquire_lanes, unless_failed
from moecomm.kernels.triton.runtime import launch

__all__ = ["compile_cases", "plan_announced"]

_HEADER = tl.constexpr(HEADER_BYTES)
_PLACES = tl.constexpr(PLACES)
_NUM_PLANES = tl.constexpr(NUM_PLANES)
_NOWHERE = tl.constexpr(NOWHERE)
_COLUMNS = 128


@triton.jit
def _sum_cards(
    cards: tl.int64,
    card_bytes: tl.int64,
    rank: tl.int32,
    num_ranks: tl.int32,
    num_experts: tl.int32,
    first_group: tl.int32,
    num_groups: tl.int32,
    counts: tl.tensor,
    totals: tl.tensor,
    bases: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """Copies counts, and writes their sums over all sources, and to `bases` those of groups before my first row."""
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
        group = column - first_group
        tl.store(bases + group, before.to(tl.int64), mask=(group >= 0) & (group < num_groups))
    tl.debug_barrier()


@triton.jit(
    do_not_specialize=[
        *("board", "slot", "num_ranks", "timeout_ns", "mailbox", "card_bytes", "num_windows", "signature"),
        *("num_experts", "num_groups", "first_group", "rank", "num_local", "alignment", "num_rows"),
    ],
    do_not_specialize_on_alignment=["ticket", "status", "fault", "arrivals", "used", "regions", "addresses"],
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
    group_rank: tl.tensor,
    group_local: tl.tensor,
    num_groups: tl.int32,
    first_group: tl.int32,
    rank: tl.int32,
    num_local: tl.int32,
    alignment: tl.int32,
    num_rows: tl.int64,
    regions: tl.tensor,
    addresses: tl.tensor,
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
    GROUPS: tl.constexpr,
) -> None:
    """One program: waits for all cards and plans from them, or reports why it cannot.

    Arguments:
        mailbox: address of mine.
        regions: `[R]` int64, address of each rank's region here.
        addresses: `[NUM_PLANES, R]` int64, overwritten: addresses here of what each rank's card names.
        bases: `[G]` int64: the row, at its rank, of my first one in each group.
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
        # Without a plan nothing goes there, so they need not be right.
        region = tl.load(regions + source, mask=is_rank, other=0)
        for plane in tl.static_range(_NUM_PLANES):
            place = tl.load(header + _PLACES + plane, mask=is_rank, other=0)
            tl.store(addresses + plane * num_ranks + source, region + place, mask=is_rank)
        _sum_cards(
            cards, card_bytes, rank, num_ranks, num_experts, first_group, num_groups, counts, totals, bases, COLUMNS
        )
        of_groups = totals + first_group
        worst = place_block(
            of_groups,
            group_rank,
            group_local,
            num_groups,
            0,
            alignment,
            num_rows,
            starts,
            ends,
            ALL_RANKS,
            GROUPS,
        )
        # Looked at here, so that nothing of it takes registers while rows are placed.
        said = tl.load(header, mask=is_rank, other=0)
        stranger = find_rank(is_rank & (said != signature) & (said != changed_signature(signature)), source, num_ranks)
        changer = find_rank(is_rank & (said == changed_signature(signature)), source, num_ranks)
        where = tl.load(header + 1, mask=is_rank, other=_NOWHERE)
        wrong = find_rank(is_rank & (where < _NOWHERE), source, num_ranks)
        if stranger < num_ranks:
            report_fault(status, fault, slot, number, stranger, 0, 0, MISMATCH)
        elif changer < num_ranks:
            report_fault(status, fault, slot, number, changer, 0, 0, CHANGED)
        elif wrong < num_ranks:
            card = (cards + wrong * card_bytes).to(tl.pointer_type(tl.int64))
            report_fault(status, fault, slot, number, wrong, tl.load(card + 1), tl.load(card + 2), BAD_ID)
        elif worst < num_groups:
            report_overflow(
                status,
                fault,
                slot,
                number,
                of_groups,
                group_rank,
                num_groups,
                ends,
                0,
                num_rows,
                GROUPS,
            )
        else:
            for first in range(0, num_groups, GROUPS):
                g = first + tl.arange(0, GROUPS)
                start = tl.load(starts + g, mask=g < num_groups, other=0)
                before = tl.load(bases + g, mask=g < num_groups, other=0)
                tl.store(bases + g, start + before, mask=g < num_groups)
            settle_block(
                of_groups,
                group_rank,
                group_local,
                num_groups,
                rank,
                num_local,
                0,
                starts,
                ends,
                offsets,
                first_rows,
                used,
                spans,
                GROUPS,
            )
            count_arrived(
                totals,
                expert_rank,
                expert_local,
                num_experts,
                rank,
                num_tokens_per_expert,
                tokens_per_expert,
                GROUPS,
            )


def plan_announced(
    control: Control,
    slot: int,
    ticket: Tensor,
    mailbox: int,
    signature: int,
    experts: tuple[Tensor, Tensor],
    groups: Groups,
    form: Form,
    places: tuple[Tensor, Tensor],
    bases: Tensor,
    scratch: Scratch,
    arrived: Arrived,
) -> None:
    """Waits for all cards and plans.

    Arguments:
        experts: the rank of each, its index there.
        groups: in which rows of this layout lie.
        places: `[R]` int64, addresses of regions; `[NUM_PLANES, R]` int64, to be overwritten with those of planes.
    """
    num_ranks, num_experts = control.num_ranks, experts[0].numel()
    tile = plan_tile(num_ranks)
    launch(
        plan_announced_kernel,
        1,
        bases.device,
        *(control.board, slot, ticket, num_ranks, control.status, control.timeout_ns, control.fault),
        *(mailbox, card_bytes(num_experts, num_ranks), control.num_windows, signature, *experts),
        *(num_experts, groups.rank, groups.local, groups.rank.numel(), groups.first),
        *(control.rank, arrived.first_rows.numel(), form.alignment, form.num_rows),
        *(*places, bases, *scratch, *arrived),
        COLUMNS=_COLUMNS,
        ALL_RANKS=triton.next_power_of_2(num_ranks),
        GROUPS=tile.groups,
        num_warps=tile.num_warps,
        maxnreg=tile.max_registers,
    )


def compile_cases() -> list[CompileCase]:
    """For each number of ranks: compilers have spilled with some and not with others."""
    kept = ("tokens_per_expert", "first_rows", "used", "spans", "bases", "starts", "ends")
    wide = (*kept, "regions", "addresses", "ticket", "status", "fault")
    narrow = ("counts", "arrivals", "totals", "num_tokens_per_expert", "offsets")
    tables = ("expert_rank", "expert_local", "group_rank", "group_local")
    ints = ("num_experts", "num_groups", "first_group", "rank", "num_ranks", "num_local", "alignment")
    types = {**dict.fromkeys(wide, "*i64"), **dict.fromkeys((*narrow, *tables), "*i32"), **dict.fromkeys(ints, "i32")}
    cases = []
    for ranks in NUMBERS_OF_RANKS:
        tile = plan_tile(ranks)
        constants = {"COLUMNS": _COLUMNS, "ALL_RANKS": ranks, "GROUPS": tile.groups}
        known = {**types, **dict.fromkeys(constants, "constexpr")}
        cases.append(
            CompileCase(
                name=f"plan_announced {ranks} ranks",
                kernel=plan_announced_kernel,
                signature={argument: known.get(argument, "i64") for argument in plan_announced_kernel.arg_names},
                constexprs=constants,
                num_warps=tile.num_warps,
                max_registers=tile.max_registers,
            )
        )
    return cases
