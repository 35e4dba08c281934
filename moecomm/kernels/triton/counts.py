"""How many rows each expert and each rank gets: counts of blocks, then sums over the blocks before each.

    T tokens   K num_topk   E num_experts   R num_ranks   B blocks

Ids outside the experts are counted nowhere. No order depends on which program is first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.triton.compile_case import CompileCase, varied
from moecomm.kernels.triton.runtime import launch, num_blocks

__all__ = [
    "IDS",
    "Counted",
    "RankTile",
    "compile_cases",
    "count_by_expert",
    "count_by_rank",
    "extreme_rank_tiles",
    "rank_tile",
    "ranks_of_tokens",
]

IDS = 128
"""Ids that one program looks at."""

_EXPERTS = 64
_BLOCKS = 32
_ELEMENTS = 2048


class Counted(NamedTuple):
    """What blocks of ids or tokens name.

    Attributes:
        before: `[B, E]` or `[B, R]` int32: how often in the blocks before each.
        totals: `[E]` or `[R]` int32.
    """

    before: Tensor
    totals: Tensor


class RankTile(NamedTuple):
    """Tokens, choices and ranks that one program compares at once; powers of two."""

    tokens: int
    choices: int
    ranks: int


def rank_tile(num_topk: int, num_ranks: int) -> RankTile:
    """As many tokens as leave the comparison of all with all small."""
    choices = triton.next_power_of_2(max(1, num_topk))
    ranks = min(16, triton.next_power_of_2(max(1, num_ranks)))
    return RankTile(max(1, min(128, _ELEMENTS // (choices * ranks))), choices, ranks)


def extreme_rank_tiles() -> list[dict[str, int]]:
    """TOKENS, CHOICES and RANKS for few and many choices and ranks, for compile cases."""
    tiles = [rank_tile(num_topk, num_ranks) for num_topk in (1, 16) for num_ranks in (1, 16)]
    return [{"TOKENS": tile.tokens, "CHOICES": tile.choices, "RANKS": tile.ranks} for tile in tiles]


@triton.jit(do_not_specialize=["num_ids", "num_experts"])
def count_experts_kernel(
    ids: tl.tensor,
    num_ids: tl.int64,
    num_experts: tl.int32,
    counts: tl.tensor,
    IDS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    """`counts` `[B, E]` int32: routes of each block to each expert."""
    block = tl.program_id(0).to(tl.int64)
    position = block * IDS + tl.arange(0, IDS)
    id = tl.load(ids + position, mask=position < num_ids, other=-1).to(tl.int64)
    for first in range(0, num_experts, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        number = tl.sum((id[:, None] == expert[None, :]).to(tl.int32), axis=0)
        tl.store(counts + block * num_experts + expert, number, mask=expert < num_experts)


@triton.jit
def ranks_of_tokens(
    ids: tl.tensor,
    t: tl.tensor,
    num_tokens: tl.int64,
    num_topk: tl.int32,
    expert_rank: tl.tensor,
    num_experts: tl.int32,
    CHOICES: tl.constexpr,
) -> tl.tensor:
    """`[tokens, CHOICES]` int32: the rank of each choice, -1 for none."""
    k = tl.arange(0, CHOICES)
    is_id = (t < num_tokens)[:, None] & (k < num_topk)[None, :]
    id = tl.load(ids + t[:, None] * num_topk + k[None, :], mask=is_id, other=-1).to(tl.int64)
    return tl.load(expert_rank + id, mask=(id >= 0) & (id < num_experts), other=-1)


@triton.jit(do_not_specialize=["num_tokens", "num_topk", "num_experts", "num_ranks"])
def count_ranks_kernel(
    ids: tl.tensor,
    num_tokens: tl.int64,
    num_topk: tl.int32,
    expert_rank: tl.tensor,
    num_experts: tl.int32,
    num_ranks: tl.int32,
    counts: tl.tensor,
    TOKENS: tl.constexpr,
    CHOICES: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """`counts` `[B, R]` int32: tokens of each block that have a choice at each rank."""
    block = tl.program_id(0).to(tl.int64)
    t = block * TOKENS + tl.arange(0, TOKENS)
    chosen = ranks_of_tokens(ids, t, num_tokens, num_topk, expert_rank, num_experts, CHOICES)
    for first in range(0, num_ranks, RANKS):
        rank = first + tl.arange(0, RANKS)
        is_there = tl.max((chosen[:, :, None] == rank[None, None, :]).to(tl.int32), axis=1)
        tl.store(counts + block * num_ranks + rank, tl.sum(is_there, axis=0), mask=rank < num_ranks)


@triton.jit(do_not_specialize=["num_blocks", "num_columns"])
def scan_blocks_kernel(
    counts: tl.tensor,
    num_blocks: tl.int64,
    num_columns: tl.int32,
    totals: tl.tensor,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Replaces each of `counts` `[B, C]` by the sum of those before it in its column; the sums of all to `totals`."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.int32)
    for first in range(0, num_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS).to(tl.int64)
        place = counts + block[:, None] * num_columns + column[None, :]
        mask = (block < num_blocks)[:, None] & (column < num_columns)[None, :]
        count = tl.load(place, mask=mask, other=0)
        tl.store(place, total[None, :] + tl.cumsum(count, axis=0) - count, mask=mask)
        total += tl.sum(count, axis=0)
    tl.store(totals + column, total, mask=column < num_columns)


def count_by_expert(ids: Tensor, num_experts: int, totals: Tensor | None = None) -> Counted:
    """Routes to each expert, in blocks of `IDS`; `ids` is contiguous. `totals` `[E]` int32 is where to leave them."""
    num_ids = ids.numel()
    counts = torch.empty(num_blocks(num_ids, IDS), num_experts, dtype=torch.int32, device=ids.device)
    args = (ids, num_ids, num_experts, counts)
    launch(count_experts_kernel, counts.shape[0], ids.device, *args, IDS=IDS, EXPERTS=_EXPERTS)
    return _summed(counts, totals)


def count_by_rank(ids: Tensor, expert_rank: Tensor, num_ranks: int, totals: Tensor | None = None) -> Counted:
    """Tokens of each rank, in blocks of `rank_tile(...).tokens`; `ids` `[T, K]` is contiguous."""
    num_tokens, num_topk = ids.shape
    tile = rank_tile(num_topk, num_ranks)
    counts = torch.empty(num_blocks(num_tokens, tile.tokens), num_ranks, dtype=torch.int32, device=ids.device)
    launch(
        count_ranks_kernel,
        counts.shape[0],
        ids.device,
        *(ids, num_tokens, num_topk, expert_rank, expert_rank.numel(), num_ranks, counts),
        TOKENS=tile.tokens,
        CHOICES=tile.choices,
        RANKS=tile.ranks,
    )
    return _summed(counts, totals)


def _summed(counts: Tensor, totals: Tensor | None) -> Counted:
    num_rows, num_columns = counts.shape
    if totals is None:
        totals = torch.empty(num_columns, dtype=torch.int32, device=counts.device)
    columns = min(64, triton.next_power_of_2(max(1, num_columns)))
    args = (counts, num_rows, num_columns, totals)
    launch(scan_blocks_kernel, num_blocks(num_columns, columns), counts.device, *args, BLOCKS=_BLOCKS, COLUMNS=columns)
    return Counted(counts, totals)


def compile_cases() -> list[CompileCase]:
    """Ids of both widths."""
    cases: list[CompileCase] = []
    for ids in ("*i32", "*i64"):
        tile = rank_tile(8, 8)
        cases += [
            CompileCase(
                name=f"count_experts {ids}",
                kernel=count_experts_kernel,
                signature={
                    "ids": ids,
                    "num_ids": "i64",
                    "num_experts": "i32",
                    "counts": "*i32",
                    "IDS": "constexpr",
                    "EXPERTS": "constexpr",
                },
                constexprs={"IDS": IDS, "EXPERTS": _EXPERTS},
            ),
            CompileCase(
                name=f"count_ranks {ids}",
                kernel=count_ranks_kernel,
                signature={
                    "ids": ids,
                    "num_tokens": "i64",
                    "num_topk": "i32",
                    "expert_rank": "*i32",
                    "num_experts": "i32",
                    "num_ranks": "i32",
                    "counts": "*i32",
                    "TOKENS": "constexpr",
                    "CHOICES": "constexpr",
                    "RANKS": "constexpr",
                },
                constexprs={"TOKENS": tile.tokens, "CHOICES": tile.choices, "RANKS": tile.ranks},
            ),
        ]
    scan = CompileCase(
        name="scan_blocks",
        kernel=scan_blocks_kernel,
        signature={
            "counts": "*i32",
            "num_blocks": "i64",
            "num_columns": "i32",
            "totals": "*i32",
            "BLOCKS": "constexpr",
            "COLUMNS": "constexpr",
        },
        constexprs={"BLOCKS": _BLOCKS, "COLUMNS": 64},
    )
    return [*cases, scan, *varied(cases[-1], extreme_rank_tiles()), *varied(scan, [{"COLUMNS": 1}])]
