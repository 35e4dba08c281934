"""What a receiver learns from the messages of a low-latency call: counts by source, and where each token's row is.

    N tokens of all sources together   K num_topk   E num_experts   R num_ranks

`ids` `[N, K]` int32 holds the ids of all sources, by source; source s has the tokens `begins[s]` to `begins[s + 1]`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.triton.compile_case import CompileCase, varied
from moecomm.kernels.triton.counts import IDS, extreme_rank_tiles, rank_tile, ranks_of_tokens
from moecomm.kernels.triton.runtime import launch, num_blocks

__all__ = ["compile_cases", "count_messages", "row_sources"]

_EXPERTS = 64


@triton.jit(do_not_specialize=["num_topk", "num_experts", "num_ranks"])
def count_message_experts_kernel(
    ids: tl.tensor,
    begins: tl.tensor,
    num_topk: tl.int32,
    num_experts: tl.int32,
    num_ranks: tl.int32,
    counts: tl.tensor,
    IDS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    """`counts[s, :E]`: routes of source s to each expert. A program counts some experts of one source."""
    num_chunks = tl.cdiv(num_experts, EXPERTS)
    source = tl.program_id(0) // num_chunks
    expert = (tl.program_id(0) % num_chunks) * EXPERTS + tl.arange(0, EXPERTS)
    end = tl.load(begins + source + 1) * num_topk
    number = tl.zeros((EXPERTS,), dtype=tl.int32)
    for first in range(tl.load(begins + source) * num_topk, end, IDS):
        position = first + tl.arange(0, IDS)
        id = tl.load(ids + position, mask=position < end, other=-1)
        number += tl.sum((id[:, None] == expert[None, :]).to(tl.int32), axis=0)
    row = source.to(tl.int64) * (num_experts + num_ranks)
    tl.store(counts + row + expert, number, mask=expert < num_experts)


@triton.jit(do_not_specialize=["num_topk", "num_experts", "num_ranks"])
def count_message_ranks_kernel(
    ids: tl.tensor,
    begins: tl.tensor,
    num_topk: tl.int32,
    expert_rank: tl.tensor,
    num_experts: tl.int32,
    num_ranks: tl.int32,
    counts: tl.tensor,
    TOKENS: tl.constexpr,
    CHOICES: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """`counts[s, E:]`: tokens of source s with a choice at each rank. A program counts some ranks of one source."""
    num_chunks = tl.cdiv(num_ranks, RANKS)
    source = tl.program_id(0) // num_chunks
    rank = (tl.program_id(0) % num_chunks) * RANKS + tl.arange(0, RANKS)
    end = tl.load(begins + source + 1)
    number = tl.zeros((RANKS,), dtype=tl.int32)
    for first in range(tl.load(begins + source), end, TOKENS):
        t = first + tl.arange(0, TOKENS)
        chosen = ranks_of_tokens(ids, t, end, num_topk, expert_rank, num_experts, CHOICES)
        is_there = tl.max((chosen[:, :, None] == rank[None, None, :]).to(tl.int32), axis=1)
        number += tl.sum(is_there, axis=0)
    row = source.to(tl.int64) * (num_experts + num_ranks) + num_experts
    tl.store(counts + row + rank, number, mask=rank < num_ranks)


@triton.jit(do_not_specialize=["num_topk", "num_experts", "rank", "row_bytes"])
def row_sources_kernel(
    ids: tl.tensor,
    begins: tl.tensor,
    num_topk: tl.int32,
    expert_rank: tl.tensor,
    num_experts: tl.int32,
    rank: tl.int32,
    first_rows: tl.tensor,
    row_bytes: tl.int64,
    sources: tl.tensor,
    TOKENS: tl.constexpr,
    CHOICES: tl.constexpr,
) -> None:
    """`sources` `[N]` int64: the address of each token's row in its message, 0 for a token without a choice here.

    A program does one source, whose rows follow each other from `first_rows[source]`.
    """
    source = tl.program_id(0)
    end = tl.load(begins + source + 1)
    following = tl.load(first_rows + source)
    for first in range(tl.load(begins + source), end, TOKENS):
        t = first + tl.arange(0, TOKENS)
        chosen = ranks_of_tokens(ids, t, end, num_topk, expert_rank, num_experts, CHOICES)
        is_here = tl.max((chosen == rank).to(tl.int32), axis=1)
        place = following + (tl.cumsum(is_here, axis=0) - is_here).to(tl.int64) * row_bytes
        tl.store(sources + t, tl.where(is_here > 0, place, 0), mask=t < end)
        following += tl.sum(is_here, axis=0) * tl.cast(row_bytes, tl.int64)


def count_messages(ids: Tensor, begins: Tensor, expert_rank: Tensor) -> Tensor:
    """`[R, E + R]` int32, as in `moecomm.kernels.eager.Sorted`. `begins` is `[R + 1]` int64."""
    num_topk = ids.shape[1]
    num_ranks, num_experts = begins.numel() - 1, expert_rank.numel()
    counts = torch.empty(num_ranks, num_experts + num_ranks, dtype=torch.int32, device=ids.device)
    launch(
        count_message_experts_kernel,
        num_ranks * num_blocks(num_experts, _EXPERTS),
        ids.device,
        *(ids, begins, num_topk, num_experts, num_ranks, counts),
        IDS=IDS,
        EXPERTS=_EXPERTS,
    )
    tile = rank_tile(num_topk, num_ranks)
    launch(
        count_message_ranks_kernel,
        num_ranks * num_blocks(num_ranks, tile.ranks),
        ids.device,
        *(ids, begins, num_topk, expert_rank, num_experts, num_ranks, counts),
        TOKENS=tile.tokens,
        CHOICES=tile.choices,
        RANKS=tile.ranks,
    )
    return counts


def row_sources(
    ids: Tensor, begins: Tensor, expert_rank: Tensor, rank: int, first_rows: Tensor, row_bytes: int
) -> Tensor:
    """`[N]` int64: the address of each token's row, 0 for a token without a choice at `rank`.

    Arguments:
        first_rows: `[R]` int64, address of the first row of each message.
    """
    num_topk = ids.shape[1]
    sources = torch.empty(ids.shape[0], dtype=torch.int64, device=ids.device)
    tile = rank_tile(num_topk, 1)
    launch(
        row_sources_kernel,
        first_rows.numel(),
        ids.device,
        *(ids, begins, num_topk, expert_rank, expert_rank.numel(), rank, first_rows, row_bytes, sources),
        TOKENS=tile.tokens,
        CHOICES=tile.choices,
    )
    return sources


def compile_cases() -> list[CompileCase]:
    """One of each."""
    ranks = rank_tile(8, 8)
    ints = dict.fromkeys(("num_topk", "num_experts", "num_ranks", "rank"), "i32")
    pointers = {"ids": "*i32", "begins": "*i64", "counts": "*i32", "expert_rank": "*i32"}
    rows = {"first_rows": "*i64", "row_bytes": "i64", "sources": "*i64"}
    kernels = {
        count_message_experts_kernel: {"IDS": IDS, "EXPERTS": _EXPERTS},
        count_message_ranks_kernel: {"TOKENS": ranks.tokens, "CHOICES": ranks.choices, "RANKS": ranks.ranks},
        row_sources_kernel: {"TOKENS": rank_tile(8, 1).tokens, "CHOICES": 8},
    }
    types = {**ints, **pointers, **rows}
    cases = [
        CompileCase(
            name=kernel.__name__.removesuffix("_kernel"),
            kernel=kernel,
            signature={name: types.get(name, "constexpr") for name in kernel.arg_names},
            constexprs=constants,
        )
        for kernel, constants in kernels.items()
    ]
    _, of_ranks, of_rows = cases
    tiles = [rank_tile(num_topk, 1) for num_topk in (1, 16)]
    cases += varied(of_rows, ({"TOKENS": tile.tokens, "CHOICES": tile.choices} for tile in tiles))
    return cases + varied(of_ranks, extreme_rank_tiles())
