"""Plans from the messages of low-latency calls, in which the receiver has counted.

E num_experts   R num_ranks   N rows of counted blocks, of all sources together
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.eager import Form
from moecomm.kernels.triton.captured_groups import (
    Arrived,
    Scratch,
    count_arrived,
    place_block,
    plan_tile,
    report_overflow,
    settle_block,
)
from moecomm.kernels.triton.captured_messages import Found
from moecomm.kernels.triton.captured_state import BAD_ID, MISMATCH, Control, report_fault
from moecomm.kernels.triton.compile_case import NUMBERS_OF_RANKS, CompileCase
from moecomm.kernels.triton.lanes import is_last_program, unless_failed
from moecomm.kernels.triton.runtime import launch, num_blocks

__all__ = ["compile_cases", "plan_messages"]

_BLOCKS = 32
_COLUMNS = 64


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
    GROUPS: tl.constexpr,
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
            GROUPS,
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
                GROUPS,
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
        GROUPS=tile.groups,
        num_warps=tile.num_warps,
        maxnreg=tile.max_registers,
    )


def compile_cases() -> list[CompileCase]:
    """For each number of ranks: compilers have spilled with some and not with others."""
    wide = ("ticket", "status", "fault", "tokens", "starts", "ends", "tokens_per_expert", "first_rows", "used", "spans")
    narrow = ("before", "bad", "expert_rank", "expert_local", "totals", "arrivals", "counts", "num_tokens_per_expert")
    ints = ("num_ranks", "num_blocks", "num_experts", "rank", "num_local", "alignment")
    types = {**dict.fromkeys(wide, "*i64"), **dict.fromkeys((*narrow, "offsets"), "*i32"), **dict.fromkeys(ints, "i32")}
    cases = []
    for ranks in NUMBERS_OF_RANKS:
        constants = {"BLOCKS": _BLOCKS, "COLUMNS": _COLUMNS, "ALL_RANKS": ranks, "GROUPS": plan_tile(ranks).groups}
        types |= dict.fromkeys(constants, "constexpr")
        cases.append(
            CompileCase(
                name=f"plan_messages {ranks} ranks",
                kernel=plan_messages_kernel,
                signature={name: types.get(name, "i64") for name in plan_messages_kernel.arg_names},
                constexprs=constants,
                num_warps=plan_tile(ranks).num_warps,
                max_registers=plan_tile(ranks).max_registers,
            )
        )
    return cases
