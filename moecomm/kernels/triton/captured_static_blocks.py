"""Blocks of throughput calls of fixed shape: what belongs to one, in memory that no call moves or makes anew.

Tmax most T of this rank   K num_topk   E num_experts   R num_ranks   H hidden   B blocks of ids or of tokens
G groups of rows, see captured_groups.py
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from moecomm.kernels.eager import Form
from moecomm.kernels.triton.captured_announce import NUM_PLANES
from moecomm.kernels.triton.captured_answers import Answered
from moecomm.kernels.triton.captured_blocks import Placed, make_arrived, make_scratch
from moecomm.kernels.triton.captured_groups import Groups, Scratch
from moecomm.kernels.triton.captured_ready import NUM_PLANES as NUM_RETURNED
from moecomm.kernels.triton.captured_zeros import Block

__all__ = ["Places", "StaticBatch", "StaticBlock", "make_static_block"]


class StaticBatch(NamedTuple):
    """What one rank sends: rows, ids, weights; `[B, E]` (flat `[B, R]`) int32 counts before each block; a signature."""

    rows: Tensor
    ids: Tensor
    weights: Tensor | None
    before: Tensor
    signature: int


class Places(NamedTuple):
    """Offsets of a block's planes in the region of all ranks; the order is that of a card.

    Attributes:
        rows: of `[num_rows, H]`.
        values: of weights; without meaning where none travel.
        ids: of local ids; flat only, otherwise without meaning.
    """

    rows: int
    values: int
    ids: int


@dataclasses.dataclass
class StaticBlock:
    """Everything that belongs to the rows of one dispatch, until the next into the same block.

    Attributes:
        placed: the rows.
        answered: the way home.
        places: where the planes are.
        groups: in which rows lie.
        is_flat: one row for each token and rank.
        addresses: `[NUM_PLANES, R]` int64, where everybody's planes of the last dispatch are.
        announced, pushed: one int64 each: tickets.
        planned: `[Tmax, K]` int64.
        bases: `[G]` int64.
        totals: `[E + R]` int32: my counts.
        scratch: for planning.
        batch: between `announce` and `push`.
    """

    placed: Placed
    answered: Answered
    places: Places
    groups: Groups
    is_flat: bool
    addresses: Tensor
    announced: Tensor
    pushed: Tensor
    planned: Tensor
    bases: Tensor
    totals: Tensor
    scratch: Scratch
    batch: StaticBatch | None = None


def make_static_block(
    form: Form,
    places: Places,
    groups: Groups,
    region: int,
    max_tokens: int,
    sizes: tuple[int, int],
    tokens_per_expert: Tensor,
    *,
    is_flat: bool,
) -> StaticBlock:
    """A block of zeros; a flat one may hold anything.

    Arguments:
        form: of the calls that fill it.
        places, groups, is_flat: as in `StaticBlock`.
        region: address here of mine.
        max_tokens: Tmax.
        sizes: R, E.
        tokens_per_expert: `[E_local]` int64, added to.
    """
    num_ranks, num_experts = sizes
    device, num_groups = tokens_per_expert.device, groups.rank.numel()

    def numbers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    def routes() -> Tensor:
        return torch.full((max_tokens, form.num_topk), -1, dtype=torch.int64, device=device)

    block = Block(
        rows=region + places.rows,
        values=region + places.values if form.value_bytes else 0,
        row_bytes=form.row_bytes,
        value_bytes=form.value_bytes,
        num_rows=form.num_rows,
        ids=region + places.ids if is_flat else 0,
        num_topk=form.num_topk if is_flat else 0,
    )
    arrived = make_arrived(num_ranks, num_experts, 1 if is_flat else tokens_per_expert.numel(), tokens_per_expert)
    placed = Placed(form, block, arrived, routes(), numbers(1))
    if is_flat:
        placed.distrust()  # ids that are none are not zero
    return StaticBlock(
        placed=placed,
        answered=Answered(
            num_rows=form.num_rows,
            num_topk=form.num_topk,
            counts=arrived.counts,
            routes=placed.routes,
            first_rows=arrived.first_rows,
            lengths=arrived.offsets if is_flat else arrived.num_tokens_per_expert,
            outputs=numbers(NUM_RETURNED, num_ranks),
            combined=placed.combined,
            released=numbers(1),
        ),
        places=places,
        groups=groups,
        is_flat=is_flat,
        addresses=numbers(NUM_PLANES, num_ranks),
        announced=numbers(1),
        pushed=numbers(1),
        planned=routes(),
        bases=numbers(num_groups),
        totals=torch.zeros(num_experts + num_ranks, dtype=torch.int32, device=device),
        scratch=make_scratch(num_ranks, num_experts, num_groups, device),
    )
