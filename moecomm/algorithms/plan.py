"""Where rows go: pure functions from the counts that all ranks know.

R ranks, E experts, N rows. EXPERT_MAJOR orders a rank's rows by local expert, source rank, source token, k;
FLAT by source rank, source token.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from moecomm import _C
from moecomm.errors import CapacityExceeded
from moecomm.placement import Placement

__all__ = ["BlockLayout", "Layout", "Plan", "block_layout", "overflow_message", "plan_exchange"]

Layout = Literal["expert_major", "flat", "slab"]

_MAX_ROWS = 2**31 - 1
_ORDERS = {"expert_major": 0, "flat": 1, "slab": 2}  # as in csrc/cpu/plan.h
_PLANE_ALIGNMENT = 64
# By mode. A low-latency block has room for every token of every rank, so that only duplicates overflow it.
_REMEDIES = {
    "throughput": "Give a larger capacity, or none",
    "low_latency": "Tokens name experts of theirs more than once: remove the duplicates",
}


class Plan(NamedTuple):
    """One rank's view of an exchange.

    Attributes:
        bases: where my rows begin. EXPERT_MAJOR, SLAB: `[E]` int64, row at the expert's rank of my first route to it;
            FLAT: `[R]` int64, row at each rank of my first token.
        rows_per_rank: `[R]`: rows that each rank receives, padding included.
        num_tokens_per_expert: `[E_local]` int32: routes that arrive here for each local expert.
        offsets: `[E_local]` int32: inclusive prefix sums of those, each padded to the alignment; SLAB: where each
            expert's rows end.
        num_rows: rows of mine, without those that only fill up to a capacity (EXPERT_MAJOR, FLAT).
    """

    bases: npt.NDArray[np.int64]
    rows_per_rank: list[int]
    num_tokens_per_expert: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int32]
    num_rows: int


def plan_exchange(
    counts: npt.NDArray[np.int32],
    placement: Placement,
    rank: int,
    layout: Layout,
    expert_alignment: int,
    capacity: int = 0,
    mode: str = "throughput",
) -> Plan:
    """Plans from all ranks' counts.

    Arguments:
        counts: `[R, E + R]` int32: per source rank its routes per expert, then its distinct tokens per rank.
        placement: which rank hosts which expert.
        rank: mine.
        layout: of the rows received.
        expert_alignment: each local expert's rows are padded to a multiple of it.
        capacity: fixed shape: rows per expert (slab), rows in all; 0 = as many as arrive.
        mode: of the call, for the remedy that an error names.

    Raises:
        CapacityExceeded: more rows than the fixed shape has; the same on every rank.
        ValueError: more rows than can be numbered; likewise.
    """
    bases, rows_per_rank, tokens, offsets, num_rows, most, full, need = _C.plan_exchange(
        counts, placement.first_expert, rank, _ORDERS[layout], expert_alignment, capacity
    )
    if full >= 0:
        what = f"expert {full}" if layout == "slab" else f"rank {full}"
        raise CapacityExceeded(overflow_message(what, need, capacity, mode))
    if most > _MAX_ROWS:
        raise ValueError(f"a rank would receive {most} rows, at most {_MAX_ROWS} are possible: {rows_per_rank}")
    return Plan(bases, rows_per_rank, tokens, offsets, num_rows)


def overflow_message(what: str, need: int, room: int, mode: str) -> str:
    """Says that a fixed shape has no room for the rows of an expert or a rank, and what would help."""
    return f"{need} rows for {what}, but there is room for {room}. {_REMEDIES[mode]}"


class BlockLayout(NamedTuple):
    """Planes of rows in one block of receive memory.

    Attributes:
        offsets: byte offset of each plane.
        nbytes: size of the block.
    """

    offsets: tuple[int, ...]
    nbytes: int


def block_layout(num_rows: int, plane_bytes: tuple[int, ...]) -> BlockLayout:
    """Lays planes of `num_rows` rows behind each other, each aligned to 64 bytes."""
    offsets = []
    end = 0
    for row_bytes in plane_bytes:
        offsets.append(end)
        end += -(-num_rows * row_bytes // _PLANE_ALIGNMENT) * _PLANE_ALIGNMENT
    return BlockLayout(tuple(offsets), end)
