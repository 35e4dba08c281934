"""Where the rows of a fixed block go, decided on the device from the counts that all ranks know.

    E num_experts   E_local experts here   R num_ranks   N rows of counted blocks, of all sources together

Every rank decides for all experts, so that what does not fit anywhere is found everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.eager import Form
from moecomm.kernels.triton.captured_messages import Found
from moecomm.kernels.triton.captured_state import BAD_ID, MISMATCH, OVERFLOW, Control, report_fault
from moecomm.kernels.triton.compile_case import CompileCase
from moecomm.kernels.triton.lanes import is_last_program, unless_failed
from moecomm.kernels.triton.runtime import launch, num_blocks

__all__ = [
    "Arrived",
    "PlanTile",
    "Scratch",
    "compile_cases",
    "place_block",
    "plan_messages",
    "plan_tile",
    "report_overflow",
    "settle_block",
]

_BLOCKS = 32
_COLUMNS = 64


class Arrived(NamedTuple):
    """What is known of a block, in memory that no call moves.

    Attributes:
        counts: `[R, E + R]` int32: per source its routes per expert, then its distinct tokens per rank.
        num_tokens_per_expert: `[E_local]` int32.
        offsets: `[E_local]` int32: where each expert's rows end, padding included; slab: without meaning.
        tokens_per_expert: `[E_local]` int64, added to.
        first_rows: `[E_local]` int64.
        used: `[max(1, E_local)]` int64: rows that hold something; slab: of each expert; expert_major: used[0] of all.
        spans: `[2, E_local + 1]` int64: rows that must become zero, begins and ends.
    """

    counts: Tensor
    num_tokens_per_expert: Tensor
    offsets: Tensor
    tokens_per_expert: Tensor
    first_rows: Tensor
    used: Tensor
    spans: Tensor


class Scratch(NamedTuple):
    """Needed while planning.

    Attributes:
        totals: `[E + R]` int32.
        starts, ends: `[E]` int64: where each expert's rows begin and end at its rank.
        arrivals: one int32, 0.
    """

    totals: Tensor
    starts: Tensor
    ends: Tensor
    arrivals: Tensor


@triton.jit
def place_block(
    totals: tl.tensor,
    expert_rank: tl.tensor,
    expert_local: tl.tensor,
    num_experts: tl.int32,
    capacity: tl.int64,
    alignment: tl.int32,
    num_rows: tl.int64,
    starts: tl.tensor,
    ends: tl.tensor,
    RANKS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> tl.tensor:
    """Writes starts and ends; gives the first expert whose rows do not fit, or E. For one program.

    Arguments:
        capacity: slab: rows per expert; 0 = expert_major, of num_rows rows.
    """
    ranks = tl.arange(0, RANKS)
    filled = tl.zeros((RANKS,), dtype=tl.int64)
    worst = tl.cast(num_experts, tl.int32)
    for first in range(0, num_experts, EXPERTS):
        e = first + tl.arange(0, EXPERTS)
        is_expert = e < num_experts
        total = tl.load(totals + e, mask=is_expert, other=0)
        rank = tl.load(expert_rank + e, mask=is_expert, other=-1)
        local = tl.load(expert_local + e, mask=is_expert, other=0).to(tl.int64)
        padded = (tl.cdiv(total, alignment) * alignment).to(tl.int64)
        is_at = rank[None, :] == ranks[:, None]
        part = tl.where(is_at, padded[None, :], 0)
        end = tl.sum(tl.where(is_at, filled[:, None] + tl.cumsum(part, axis=1), 0), axis=0)
        filled += tl.sum(part, axis=1)
        start = tl.where(capacity > 0, local * capacity, end - padded)
        is_over = tl.where(capacity > 0, total > capacity, end > num_rows)
        tl.store(starts + e, start, mask=is_expert)
        tl.store(ends + e, tl.where(capacity > 0, start + total, end), mask=is_expert)
        worst = tl.minimum(worst, tl.min(tl.where(is_expert & is_over, e, num_experts), axis=0))
    tl.debug_barrier()
    return worst


@triton.jit
def settle_block(
    totals: tl.tensor,
    expert_rank: tl.tensor,
    expert_local: tl.tensor,
    num_experts: tl.int32,
    rank: tl.int32,
    num_local: tl.int32,
    capacity: tl.int64,
    starts: tl.tensor,
    ends: tl.tensor,
    num_tokens_per_expert: tl.tensor,
    offsets: tl.tensor,
    tokens_per_expert: tl.tensor,
    first_rows: tl.tensor,
    used: tl.tensor,
    spans: tl.tensor,
    EXPERTS: tl.constexpr,
) -> None:
    """Writes what `Arrived` holds of my experts, but for the counts. For one program, behind `place_block`."""
    begins, behind = spans, spans + num_local + 1
    last = tl.cast(0, tl.int64)
    in_slabs = tl.where(capacity > 0, num_experts, 0)
    for first in range(0, num_experts, EXPERTS):
        e = first + tl.arange(0, EXPERTS)
        is_mine = tl.load(expert_rank + e, mask=e < num_experts, other=-1) == rank
        local = tl.load(expert_local + e, mask=is_mine, other=0)
        total = tl.load(totals + e, mask=is_mine, other=0)
        start = tl.load(starts + e, mask=is_mine, other=0)
        end = tl.load(ends + e, mask=is_mine, other=0)
        tl.store(num_tokens_per_expert + local, total, mask=is_mine)
        tl.store(offsets + local, end.to(tl.int32), mask=is_mine)
        tl.store(first_rows + local, start, mask=is_mine)
        so_far = tl.load(tokens_per_expert + local, mask=is_mine, other=0)
        tl.store(tokens_per_expert + local, so_far + total, mask=is_mine)
        before = tl.load(used + local, mask=is_mine & (e < in_slabs), other=0)
        tl.store(used + local, total.to(tl.int64), mask=is_mine & (e < in_slabs))
        tl.store(begins + local, start + total, mask=is_mine)
        tl.store(behind + local, tl.where(capacity > 0, start + before, end), mask=is_mine)
        last = tl.maximum(last, tl.max(end, axis=0))
    if capacity > 0:
        last = tl.cast(0, tl.int64)
    tl.store(begins + num_local, last)
    if capacity > 0:
        tl.store(behind + num_local, last)
    else:
        tl.store(behind + num_local, tl.load(used))
        tl.store(used, last)


@triton.jit
def report_overflow(
    status: tl.tensor,
    fault: tl.tensor,
    slot: tl.int64,
    ticket: tl.int64,
    totals: tl.tensor,
    expert_rank: tl.tensor,
    num_experts: tl.int32,
    ends: tl.tensor,
    capacity: tl.int64,
    num_rows: tl.int64,
    EXPERTS: tl.constexpr,
) -> None:
    """Says that something does not fit, and names the fullest expert (slab) or rank. For one program."""
    most = tl.cast(-1, tl.int64)
    fullest = tl.cast(0, tl.int32)
    for first in range(0, num_experts, EXPERTS):
        e = first + tl.arange(0, EXPERTS)
        total = tl.load(totals + e, mask=e < num_experts, other=-1).to(tl.int64)
        need = tl.where(capacity > 0, total, tl.load(ends + e, mask=e < num_experts, other=-1))
        here = tl.max(need, axis=0)
        if here > most:
            fullest = tl.min(tl.where(need == here, e, num_experts), axis=0).to(tl.int32)
            most = here
    place = tl.where(capacity > 0, fullest, tl.load(expert_rank + fullest))
    report_fault(status, fault, slot, ticket, place, most, tl.where(capacity > 0, capacity, num_rows), OVERFLOW)


@triton.jit
def _first_stranger(tokens: tl.tensor, num_ranks: tl.int32, RANKS: tl.constexpr) -> tl.tensor:
    """The first source whose message is of another form, or R."""
    source = tl.arange(0, RANKS)
    number = tl.load(tokens + source, mask=source < num_ranks, other=0)
    return tl.min(tl.where(number < 0, source, num_ranks), axis=0)


@triton.jit
def _first_bad(bad: tl.tensor, num_rows: tl.int32, BLOCKS: tl.constexpr) -> tl.tensor:
    """The first block with an id that is none, or num_rows."""
    found = tl.cast(num_rows, tl.int32)
    for first in range(0, num_rows, BLOCKS):
        row = first + tl.arange(0, BLOCKS)
        where = tl.load(bad + row * 2, mask=row < num_rows, other=0x7FFFFFFF)
        found = tl.minimum(found, tl.min(tl.where(where < 0x7FFFFFFF, row, num_rows), axis=0))
    return found


@triton.jit(
    do_not_specialize=[
        *("slot", "num_ranks", "num_blocks", "num_experts", "rank", "num_local", "capacity", "alignment", "num_rows"),
    ],
    do_not_specialize_on_alignment=["ticket", "tokens", "bad", "status", "fault", "arrivals", "used"],
)
def plan_messages_kernel(
    slot: tl.int64,
    ticket: tl.tensor,
    status: tl.tensor,
    fault: tl.tensor,
    tokens: tl.tensor,
    before: tl.tensor,
    bad: tl.tensor,
    num_ranks: tl.int32,
    num_blocks: tl.int32,
    expert_rank: tl.tensor,
    expert_local: tl.tensor,
    num_experts: tl.int32,
    rank: tl.int32,
    num_local: tl.int32,
    capacity: tl.int64,
    alignment: tl.int32,
    num_rows: tl.int64,
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
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALL_RANKS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    """Sums up the columns of blocks, some by each program; the last program plans, or reports why it cannot.

    Arguments:
        before: `[N, E + R]` int32: counts of blocks, replaced by how many are in all blocks before, of all sources.
    """
    num_columns = num_experts + num_ranks
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    total = tl.zeros((COLUMNS,), dtype=tl.int32)
    for source in range(0, unless_failed(status, num_ranks)):
        number = tl.zeros((COLUMNS,), dtype=tl.int32)
        for first in range(0, num_blocks, BLOCKS):
            block = first + tl.arange(0, BLOCKS)
            row = tl.cast(source, tl.int64) * num_blocks + block
            place = before + row[:, None] * num_columns + column[None, :]
            mask = (block < num_blocks)[:, None] & is_column[None, :]
            count = tl.load(place, mask=mask, other=0)
            tl.store(place, (total + number)[None, :] + tl.cumsum(count, axis=0) - count, mask=mask)
            number += tl.sum(count, axis=0)
        tl.store(counts + tl.cast(source, tl.int64) * num_columns + column, number, mask=is_column)
        total += number
    if unless_failed(status, 1) > 0:
        tl.store(totals + column, total, mask=is_column)
    if is_last_program(arrivals) and unless_failed(status, 1) > 0:
        stranger = _first_stranger(tokens, num_ranks, ALL_RANKS)
        wrong = _first_bad(bad, num_ranks * num_blocks, 128)
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
        number = tl.load(ticket)
        if stranger < num_ranks:
            report_fault(status, fault, slot, number, stranger, 0, 0, MISMATCH)
        elif wrong < num_ranks * num_blocks:
            where, id = tl.load(bad + wrong * 2), tl.load(bad + wrong * 2 + 1)
            report_fault(status, fault, slot, number, wrong // num_blocks, where, id, BAD_ID)
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


class PlanTile(NamedTuple):
    """EXPERTS of kernels that plan, all of which are compared with all ranks at once; and their warps."""

    experts: int
    num_warps: int


def plan_tile(num_ranks: int) -> PlanTile:
    """As many as the registers of a program hold: the compilers of all supported versions spill none."""
    ranks = int(triton.next_power_of_2(num_ranks))
    return PlanTile(max(16, min(64, 512 // ranks)), 4) if ranks <= 16 else PlanTile(max(16, 2048 // ranks), 8)


def plan_messages(
    control: Control,
    slot: int,
    ticket: Tensor,
    found: Found,
    experts: tuple[Tensor, Tensor],
    form: Form,
    scratch: Scratch,
    arrived: Arrived,
) -> None:
    """Plans from the counts in `found`, of which is left what is before each block.

    `experts`: the rank of each, its index there.
    """
    expert_rank, _ = experts
    num_ranks, num_experts = control.num_ranks, expert_rank.numel()
    tile = plan_tile(num_ranks)
    launch(
        plan_messages_kernel,
        num_blocks(num_experts + num_ranks, _COLUMNS),
        expert_rank.device,
        *(slot, ticket, control.status, control.fault, *found, num_ranks, found.counts.shape[0] // num_ranks),
        *(*experts, num_experts, control.rank, arrived.num_tokens_per_expert.numel()),
        *(form.capacity, form.alignment, form.num_rows, *scratch, *arrived),
        BLOCKS=_BLOCKS,
        COLUMNS=_COLUMNS,
        ALL_RANKS=triton.next_power_of_2(num_ranks),
        EXPERTS=tile.experts,
        num_warps=tile.num_warps,
    )


def compile_cases() -> list[CompileCase]:
    """Some ranks and many."""
    wide = ("ticket", "status", "fault", "tokens", "starts", "ends", "tokens_per_expert", "first_rows", "used", "spans")
    narrow = ("before", "bad", "expert_rank", "expert_local", "totals", "arrivals", "counts", "num_tokens_per_expert")
    ints = ("num_ranks", "num_blocks", "num_experts", "rank", "num_local", "alignment")
    types = {**dict.fromkeys(wide, "*i64"), **dict.fromkeys((*narrow, "offsets"), "*i32"), **dict.fromkeys(ints, "i32")}
    cases = []
    for ranks in (8, 128):
        constants = {"BLOCKS": _BLOCKS, "COLUMNS": _COLUMNS, "ALL_RANKS": ranks, "EXPERTS": plan_tile(ranks).experts}
        types |= dict.fromkeys(constants, "constexpr")
        cases.append(
            CompileCase(
                name=f"plan_messages {ranks} ranks",
                kernel=plan_messages_kernel,
                signature={name: types.get(name, "i64") for name in plan_messages_kernel.arg_names},
                constexprs=constants,
                num_warps=plan_tile(ranks).num_warps,
            )
        )
    return cases
