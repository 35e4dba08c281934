"""The row of each route: where the block's rows begin, and how many of the block come before.

Shapes as in `moecomm.kernels.triton.counts`. Rows of one expert, or rank, follow each other in the order of the ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.triton.compile_case import CompileCase, varied
from moecomm.kernels.triton.counts import (
    IDS,
    count_by_expert,
    count_by_rank,
    extreme_rank_tiles,
    rank_tile,
    ranks_of_tokens,
)
from moecomm.kernels.triton.runtime import launch

__all__ = ["compile_cases", "plan_by_expert", "plan_by_rank", "route_by_expert", "route_by_rank"]


@triton.jit(do_not_specialize=["num_ids", "num_experts"])
def plan_experts_kernel(
    ids: tl.tensor,
    num_ids: tl.int64,
    expert_rank: tl.tensor,
    num_experts: tl.int32,
    bases: tl.tensor,
    before: tl.tensor,
    routes: tl.tensor,
    IDS: tl.constexpr,
) -> None:
    """`routes` of a block of ids. `before` `[B, E]` int32: routes to each expert in the blocks before."""
    block = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, IDS)
    position = block * IDS + place
    id = tl.load(ids + position, mask=position < num_ids, other=-1).to(tl.int64)
    # The same ids once more, along the other dimension, to compare each with those before it.
    other = block * IDS + tl.arange(0, IDS)
    earlier = tl.load(ids + other, mask=other < num_ids, other=-1).to(tl.int64)
    is_earlier = (earlier[None, :] == id[:, None]) & (place[None, :] < place[:, None])
    is_route = (id >= 0) & (id < num_experts)
    row = tl.load(bases + id, mask=is_route, other=0)
    row += tl.load(before + block * num_experts + id, mask=is_route, other=0)
    row += tl.sum(is_earlier.to(tl.int32), axis=1)
    rank = tl.load(expert_rank + id, mask=is_route, other=0).to(tl.int64)
    tl.store(routes + position, tl.where(is_route, (rank << 40) + row, -1), mask=position < num_ids)


@triton.jit(do_not_specialize=["num_tokens", "num_topk", "num_experts", "num_ranks"])
def plan_ranks_kernel(
    ids: tl.tensor,
    num_tokens: tl.int64,
    num_topk: tl.int32,
    expert_rank: tl.tensor,
    num_experts: tl.int32,
    num_ranks: tl.int32,
    bases: tl.tensor,
    before: tl.tensor,
    routes: tl.tensor,
    TOKENS: tl.constexpr,
    CHOICES: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """`routes` of a block of tokens. `before` `[B, R]` int32: tokens of each rank in the blocks before."""
    block = tl.program_id(0).to(tl.int64)
    t = block * TOKENS + tl.arange(0, TOKENS)
    chosen = ranks_of_tokens(ids, t, num_tokens, num_topk, expert_rank, num_experts, CHOICES)
    num_routes = tl.zeros((TOKENS,), dtype=tl.int32)
    for first in range(0, num_ranks, RANKS):
        rank = first + tl.arange(0, RANKS)
        is_there = tl.max((chosen[:, :, None] == rank[None, None, :]).to(tl.int32), axis=1)
        slot = num_routes[:, None] + tl.cumsum(is_there, axis=1) - is_there
        row = tl.load(bases + rank, mask=rank < num_ranks, other=0)
        row += tl.load(before + block * num_ranks + rank, mask=rank < num_ranks, other=0)
        route = (rank.to(tl.int64) << 40)[None, :] + row[None, :] + tl.cumsum(is_there, axis=0) - is_there
        tl.store(routes + t[:, None] * num_topk + slot, route, mask=is_there > 0)
        num_routes += tl.sum(is_there, axis=1)
    p = tl.arange(0, CHOICES)
    is_rest = (p[None, :] >= num_routes[:, None]) & (p < num_topk)[None, :] & (t < num_tokens)[:, None]
    nowhere = tl.full((TOKENS, CHOICES), -1, dtype=tl.int64)
    tl.store(routes + t[:, None] * num_topk + p[None, :], nowhere, mask=is_rest)


def plan_by_expert(ids: Tensor, expert_rank: Tensor, bases: Tensor) -> Tensor:
    """`plan_expert_major` of contiguous ids; arguments are checked."""
    routes = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    route_by_expert(ids, expert_rank, bases, count_by_expert(ids, expert_rank.numel()).before, routes)
    return routes


def route_by_expert(ids: Tensor, expert_rank: Tensor, bases: Tensor, before: Tensor, routes: Tensor) -> None:
    """`plan_by_expert` with `before` of `count_by_expert`, to `routes` `[T, K]` int64."""
    args = (ids, ids.numel(), expert_rank, expert_rank.numel(), bases, before, routes)
    launch(plan_experts_kernel, before.shape[0], ids.device, *args, IDS=IDS)


def plan_by_rank(ids: Tensor, expert_rank: Tensor, bases: Tensor) -> Tensor:
    """`plan_flat` of contiguous ids; arguments are checked."""
    routes = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    route_by_rank(ids, expert_rank, bases, count_by_rank(ids, expert_rank, bases.numel()).before, routes)
    return routes


def route_by_rank(ids: Tensor, expert_rank: Tensor, bases: Tensor, before: Tensor, routes: Tensor) -> None:
    """`plan_by_rank` with `before` of `count_by_rank`, to `routes` `[T, K]` int64."""
    num_tokens, num_topk = ids.shape
    num_ranks = bases.numel()
    tile = rank_tile(num_topk, num_ranks)
    launch(
        plan_ranks_kernel,
        before.shape[0],
        ids.device,
        *(ids, num_tokens, num_topk, expert_rank, expert_rank.numel(), num_ranks, bases, before, routes),
        TOKENS=tile.tokens,
        CHOICES=tile.choices,
        RANKS=tile.ranks,
    )


def compile_cases() -> list[CompileCase]:
    """Ids of both widths."""
    cases: list[CompileCase] = []
    for ids in ("*i32", "*i64"):
        tile = rank_tile(8, 8)
        common = {
            "ids": ids,
            "expert_rank": "*i32",
            "num_experts": "i32",
            "bases": "*i64",
            "before": "*i32",
            "routes": "*i64",
        }
        cases += [
            CompileCase(
                name=f"plan_experts {ids}",
                kernel=plan_experts_kernel,
                signature={**common, "num_ids": "i64", "IDS": "constexpr"},
                constexprs={"IDS": IDS},
            ),
            CompileCase(
                name=f"plan_ranks {ids}",
                kernel=plan_ranks_kernel,
                signature={
                    **common,
                    "num_tokens": "i64",
                    "num_topk": "i32",
                    "num_ranks": "i32",
                    "TOKENS": "constexpr",
                    "CHOICES": "constexpr",
                    "RANKS": "constexpr",
                },
                constexprs={"TOKENS": tile.tokens, "CHOICES": tile.choices, "RANKS": tile.ranks},
            ),
        ]
    return cases + varied(cases[-1], extreme_rank_tiles())
