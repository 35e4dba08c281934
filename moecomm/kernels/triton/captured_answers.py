"""What a combine of fixed shape wants of the dispatch whose rows it brings home, apart from those rows' memory.

T num_tokens   K num_topk   E num_experts   R num_ranks   G_local groups of rows here, see captured_groups.py

A block has its own, which the next dispatch into it overwrites. Where the way home is wanted longer than the rows are,
as by a backward whose forward's rows are not kept, it is copied.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.triton.captured_ready import NUM_PLANES
from moecomm.kernels.triton.compile_case import CompileCase
from moecomm.kernels.triton.lanes import unless_failed
from moecomm.kernels.triton.runtime import launch, num_blocks

__all__ = ["Answered", "answered_in", "answered_words", "compile_cases", "keep_answered"]

_WORDS = 512


@dataclasses.dataclass
class Answered:
    """Where the rows of one dispatch are, and where they go.

    Attributes:
        num_rows: of a block.
        num_topk: K.
        counts: `[R, E + R]` int32.
        routes: `[Tmax, K]` int64 of my tokens, of which the first T are the dispatch's.
        first_rows, lengths: `[G_local]` int64 and int32: of each group's rows here, without padding.
        outputs: `[NUM_PLANES, R]` int64, where everybody's planes of the last combine are.
        combined, released: one int64 each: tickets of its readiness and of its release.
        num_tokens: T.
    """

    num_rows: int
    num_topk: int
    counts: Tensor
    routes: Tensor
    first_rows: Tensor
    lengths: Tensor
    outputs: Tensor
    combined: Tensor
    released: Tensor
    num_tokens: int = 0


@triton.jit(
    do_not_specialize=["num_routes", "num_counts", "num_groups"],
    do_not_specialize_on_alignment=[
        *("routes", "kept_routes", "counts", "kept_counts"),
        *("first_rows", "kept_first_rows", "lengths", "kept_lengths", "status"),
    ],
)
def keep_answered_kernel(
    routes: tl.tensor,
    kept_routes: tl.tensor,
    num_routes: tl.int64,
    counts: tl.tensor,
    kept_counts: tl.tensor,
    num_counts: tl.int64,
    first_rows: tl.tensor,
    kept_first_rows: tl.tensor,
    lengths: tl.tensor,
    kept_lengths: tl.tensor,
    num_groups: tl.int64,
    status: tl.tensor,
    WORDS: tl.constexpr,
) -> None:
    """Copies a piece of everything; once a call has failed, nothing has arrived and nothing goes home."""
    position = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    is_route, is_count, is_group = position < num_routes, position < num_counts, position < num_groups
    num_right = unless_failed(status, tl.maximum(tl.maximum(num_routes, num_counts), num_groups))
    is_right = position < num_right
    route = tl.load(routes + position, mask=is_route & is_right, other=-1)
    tl.store(kept_routes + position, route, mask=is_route)
    count = tl.load(counts + position, mask=is_count & is_right, other=0)
    tl.store(kept_counts + position, count, mask=is_count)
    first = tl.load(first_rows + position, mask=is_group & is_right, other=0)
    tl.store(kept_first_rows + position, first, mask=is_group)
    length = tl.load(lengths + position, mask=is_group & is_right, other=0)
    tl.store(kept_lengths + position, length, mask=is_group)


def answered_words(answered: Answered, num_tokens: int) -> int:
    """Words of 64 bits that a copy of it takes."""
    return sum(_parts(answered, num_tokens))


def answered_in(answered: Answered, memory: Tensor, num_tokens: int) -> Answered:
    """A copy of it, once `keep_answered` has filled it.

    Arguments:
        memory: `[answered_words(answered, num_tokens)]` int64.
        num_tokens: T.
    """
    parts = torch.split(memory, _parts(answered, num_tokens))
    combined, released, outputs, routes, first_rows, counts, lengths = parts
    return Answered(
        num_rows=answered.num_rows,
        num_topk=answered.num_topk,
        counts=counts.view(torch.int32)[: answered.counts.numel()].view(answered.counts.shape),
        routes=routes.view(num_tokens, answered.num_topk),
        first_rows=first_rows,
        lengths=lengths.view(torch.int32)[: answered.lengths.numel()],
        outputs=outputs.view(answered.outputs.shape),
        combined=combined,
        released=released,
        num_tokens=num_tokens,
    )


def _parts(answered: Answered, num_tokens: int) -> list[int]:
    num_ranks = answered.outputs.shape[1]
    narrow = [-(-numbers.numel() // 2) for numbers in (answered.counts, answered.lengths)]
    return [1, 1, NUM_PLANES * num_ranks, num_tokens * answered.num_topk, answered.first_rows.numel(), *narrow]


def keep_answered(answered: Answered, kept: Answered, status: Tensor) -> None:
    """Copies what a dispatch has left in a block."""
    num_routes, num_counts, num_groups = kept.routes.numel(), kept.counts.numel(), kept.lengths.numel()
    launch(
        keep_answered_kernel,
        num_blocks(max(num_routes, num_counts, num_groups), _WORDS),
        status.device,
        *(answered.routes, kept.routes, num_routes, answered.counts, kept.counts, num_counts),
        *(answered.first_rows, kept.first_rows, answered.lengths, kept.lengths, num_groups, status),
        WORDS=_WORDS,
    )


def compile_cases() -> list[CompileCase]:
    """One."""
    types = dict.fromkeys(("num_routes", "num_counts", "num_groups"), "i64")
    types |= dict.fromkeys(("counts", "kept_counts", "lengths", "kept_lengths"), "*i32")
    types["WORDS"] = "constexpr"
    return [
        CompileCase(
            name="keep_answered",
            kernel=keep_answered_kernel,
            signature={name: types.get(name, "*i64") for name in keep_answered_kernel.arg_names},
            constexprs={"WORDS": _WORDS},
        )
    ]
