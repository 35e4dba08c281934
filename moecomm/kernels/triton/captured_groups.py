"""Where the rows of fixed blocks go at every rank, decided on the device from counts that all ranks know.

    E num_experts   E_local experts here   R num_ranks   G groups of all ranks   G_local groups here

Rows of a rank lie in groups: those of each local expert, or (flat) all that it has, which are one. Every rank decides
for all groups, so that what does not fit anywhere is found everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.triton.captured_state import OVERFLOW, report_fault

__all__ = [
    "Arrived",
    "Groups",
    "PlanTile",
    "Scratch",
    "count_arrived",
    "place_block",
    "plan_tile",
    "report_overflow",
    "settle_block",
]


class Groups(NamedTuple):
    """What rows are grouped by.

    Attributes:
        rank, local: `[G]` int32: the rank of each group, and its index there.
        first: the column of counts that is the first group's; those of the others follow.
    """

    rank: Tensor
    local: Tensor
    first: int


class Arrived(NamedTuple):
    """What is known of a block, in memory that no call moves.

    Attributes:
        counts: `[R, E + R]` int32: per source its routes per expert, then its distinct tokens per rank.
        num_tokens_per_expert: `[E_local]` int32.
        offsets: `[G_local]` int32: where each group's rows end, padding included; slab: without meaning.
        tokens_per_expert: `[E_local]` int64, added to.
        first_rows: `[G_local]` int64.
        used: `[max(1, G_local)]` int64: rows that hold something; slab: of each expert; otherwise used[0] of all.
        spans: `[2, G_local + 1]` int64: rows that must become blank, begins and ends.
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
        starts, ends: `[G]` int64: where each group's rows begin and end at its rank.
        arrivals: one int32, 0.
    """

    totals: Tensor
    starts: Tensor
    ends: Tensor
    arrivals: Tensor


@triton.jit
def place_block(
    totals: tl.tensor,
    group_rank: tl.tensor,
    group_local: tl.tensor,
    num_groups: tl.int32,
    capacity: tl.int64,
    alignment: tl.int32,
    num_rows: tl.int64,
    starts: tl.tensor,
    ends: tl.tensor,
    RANKS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tl.tensor:
    """Writes starts and ends; gives the first group whose rows do not fit, or G. For one program.

    Arguments:
        totals: `[G]` int32, rows of each.
        capacity: slab: rows of each; 0 = they follow each other, in num_rows rows.
    """
    ranks = tl.arange(0, RANKS)
    filled = tl.zeros((RANKS,), dtype=tl.int64)
    worst = tl.cast(num_groups, tl.int32)
    for first in range(0, num_groups, GROUPS):
        g = first + tl.arange(0, GROUPS)
        is_group = g < num_groups
        total = tl.load(totals + g, mask=is_group, other=0)
        rank = tl.load(group_rank + g, mask=is_group, other=-1)
        local = tl.load(group_local + g, mask=is_group, other=0).to(tl.int64)
        padded = (tl.cdiv(total, alignment) * alignment).to(tl.int64)
        is_at = rank[None, :] == ranks[:, None]
        part = tl.where(is_at, padded[None, :], 0)
        end = tl.sum(tl.where(is_at, filled[:, None] + tl.cumsum(part, axis=1), 0), axis=0)
        filled += tl.sum(part, axis=1)
        start = tl.where(capacity > 0, local * capacity, end - padded)
        is_over = tl.where(capacity > 0, total > capacity, end > num_rows)
        tl.store(starts + g, start, mask=is_group)
        tl.store(ends + g, tl.where(capacity > 0, start + total, end), mask=is_group)
        worst = tl.minimum(worst, tl.min(tl.where(is_group & is_over, g, num_groups), axis=0))
    tl.debug_barrier()
    return worst


@triton.jit
def settle_block(
    totals: tl.tensor,
    group_rank: tl.tensor,
    group_local: tl.tensor,
    num_groups: tl.int32,
    rank: tl.int32,
    num_local: tl.int32,
    capacity: tl.int64,
    starts: tl.tensor,
    ends: tl.tensor,
    offsets: tl.tensor,
    first_rows: tl.tensor,
    used: tl.tensor,
    spans: tl.tensor,
    GROUPS: tl.constexpr,
) -> None:
    """Writes what `Arrived` holds of my groups. For one program, behind `place_block`."""
    begins, behind = spans, spans + num_local + 1
    last = tl.cast(0, tl.int64)
    in_slabs = tl.where(capacity > 0, num_groups, 0)
    for first in range(0, num_groups, GROUPS):
        g = first + tl.arange(0, GROUPS)
        is_mine = tl.load(group_rank + g, mask=g < num_groups, other=-1) == rank
        local = tl.load(group_local + g, mask=is_mine, other=0)
        total = tl.load(totals + g, mask=is_mine, other=0)
        start = tl.load(starts + g, mask=is_mine, other=0)
        end = tl.load(ends + g, mask=is_mine, other=0)
        tl.store(offsets + local, end.to(tl.int32), mask=is_mine)
        tl.store(first_rows + local, start, mask=is_mine)
        before = tl.load(used + local, mask=is_mine & (g < in_slabs), other=0)
        tl.store(used + local, total.to(tl.int64), mask=is_mine & (g < in_slabs))
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
def count_arrived(
    totals: tl.tensor,
    expert_rank: tl.tensor,
    expert_local: tl.tensor,
    num_experts: tl.int32,
    rank: tl.int32,
    num_tokens_per_expert: tl.tensor,
    tokens_per_expert: tl.tensor,
    EXPERTS: tl.constexpr,
) -> None:
    """Writes what `Arrived` holds of my experts. For one program."""
    for first in range(0, num_experts, EXPERTS):
        e = first + tl.arange(0, EXPERTS)
        is_mine = tl.load(expert_rank + e, mask=e < num_experts, other=-1) == rank
        local = tl.load(expert_local + e, mask=is_mine, other=0)
        total = tl.load(totals + e, mask=is_mine, other=0)
        tl.store(num_tokens_per_expert + local, total, mask=is_mine)
        so_far = tl.load(tokens_per_expert + local, mask=is_mine, other=0)
        tl.store(tokens_per_expert + local, so_far + total, mask=is_mine)


@triton.jit
def report_overflow(
    status: tl.tensor,
    fault: tl.tensor,
    slot: tl.int64,
    ticket: tl.int64,
    totals: tl.tensor,
    group_rank: tl.tensor,
    num_groups: tl.int32,
    ends: tl.tensor,
    capacity: tl.int64,
    num_rows: tl.int64,
    GROUPS: tl.constexpr,
) -> None:
    """Says that something does not fit, and names the fullest group (slab) or rank. For one program."""
    most = tl.cast(-1, tl.int64)
    fullest = tl.cast(0, tl.int32)
    for first in range(0, num_groups, GROUPS):
        g = first + tl.arange(0, GROUPS)
        total = tl.load(totals + g, mask=g < num_groups, other=-1).to(tl.int64)
        need = tl.where(capacity > 0, total, tl.load(ends + g, mask=g < num_groups, other=-1))
        here = tl.max(need, axis=0)
        if here > most:
            fullest = tl.min(tl.where(need == here, g, num_groups), axis=0).to(tl.int32)
            most = here
    place = tl.where(capacity > 0, fullest, tl.load(group_rank + fullest))
    report_fault(status, fault, slot, ticket, place, most, tl.where(capacity > 0, capacity, num_rows), OVERFLOW)


class PlanTile(NamedTuple):
    """GROUPS of kernels that plan, all of which are compared with all ranks at once; and how they are launched.

    Compilers spill some registers to let more programs run on a processor, but not below a limit that they are given:
    here one program runs alone.
    """

    groups: int
    num_warps: int
    max_registers: int = 128


def plan_tile(num_ranks: int) -> PlanTile:
    """As many as the registers of a program hold: the compilers of all supported versions spill none."""
    ranks = int(triton.next_power_of_2(num_ranks))
    return PlanTile(32, 4) if ranks <= 16 else PlanTile(max(16, 2048 // ranks), 8)
