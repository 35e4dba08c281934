"""Which rows belong to which expert, on the host and on the device, and how a grid walks their tiles.

N rows, E experts of this rank. Expert e owns a segment of rows: those between two offsets (expert_major), or `capacity`
rows of its own (slab). Of a segment the first `count` rows are real, the others padding.

    rows      0 ........ offsets[0] ......... offsets[1] ...... N
    expert    0 0 0 0 -  1 1 1 1 1 - - -      2 = nobody's          - padding

The rows beyond the last offset are treated as the segment of one more expert that has no real row.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Segments", "locate", "segment_bounds", "tile_ends"]


@dataclasses.dataclass(frozen=True)
class Segments:
    """The rows of each expert. Values stay on the device: none is read by the host.

    Attributes:
        num_experts: E.
        num_rows: N; slab: E * capacity.
        offsets: `[E]` int32 or int64, inclusive prefix sums of the segments' lengths, alignment included; None = slab.
        num_tokens_per_expert: `[E]` int32 or int64, real rows of each segment; None = all are real.
        capacity: slab: rows of each segment; 0 = expert_major.
    """

    num_experts: int
    num_rows: int
    offsets: Tensor | None
    num_tokens_per_expert: Tensor | None
    capacity: int

    @classmethod
    def expert_major(cls, num_rows: int, offsets: Tensor, num_tokens_per_expert: Tensor | None = None) -> Segments:
        """Segments that end at `offsets`. Values outside 0 .. num_rows are taken for the nearest within.

        Raises:
            ValueError: shapes or dtypes that do not fit.
        """
        _check_counts("offsets", offsets, offsets.numel())
        if num_tokens_per_expert is not None:
            _check_counts("num_tokens_per_expert", num_tokens_per_expert, offsets.numel())
        counts = None if num_tokens_per_expert is None else num_tokens_per_expert.contiguous()
        return cls(offsets.numel(), num_rows, offsets.contiguous(), counts, 0)

    @classmethod
    def slab(cls, capacity: int, num_tokens_per_expert: Tensor) -> Segments:
        """Segments of `capacity` rows each, of which `num_tokens_per_expert` are real.

        Raises:
            ValueError: shapes or dtypes that do not fit.
        """
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        num_experts = num_tokens_per_expert.numel()
        _check_counts("num_tokens_per_expert", num_tokens_per_expert, num_experts)
        return cls(num_experts, num_experts * capacity, None, num_tokens_per_expert.contiguous(), capacity)

    @property
    def block_experts(self) -> int:
        """Lanes of the vector that holds one value per segment, nobody's included: a power of two."""
        return 1 << self.num_experts.bit_length()

    @property
    def rows_per_expert(self) -> int:
        """Mean length of a segment, rounded up to a power of two: what is known without reading the device."""
        mean = -(-self.num_rows // max(1, self.num_experts))
        return 1 << max(0, mean - 1).bit_length()

    def max_row_tiles(self, block_rows: int) -> int:
        """At least as many tiles of `block_rows` rows as all segments have together, whatever the offsets are."""
        if self.offsets is None:
            return self.num_experts * -(-self.capacity // block_rows)
        return self.num_rows // block_rows + self.num_experts + 1


def _check_counts(name: str, counts: Tensor, num_experts: int) -> None:
    if counts.shape != (num_experts,) or counts.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32 or int64 [{num_experts}], got {counts.dtype} {list(counts.shape)}")


@triton.jit
def segment_bounds(
    expert: tl.tensor,
    offsets_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    num_experts: tl.tensor,
    num_rows: tl.tensor,
    capacity: tl.tensor,
    CLEARS_PADDING: tl.constexpr,
    CLEARS_TAIL: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """First row, rows to visit and real rows of a segment (int64); `expert` is a scalar or a vector, E = nobody's."""
    is_owner = expert < num_experts
    if offsets_ptr is None:
        begin = tl.where(is_owner, expert.to(tl.int64) * capacity, 0)
        length = tl.where(is_owner, capacity, 0).to(tl.int64)
    else:
        last = tl.cast(num_rows, tl.int64)
        has_begin = (expert > 0) & (expert <= num_experts)
        begin = tl.load(offsets_ptr + (expert - 1), mask=has_begin, other=0).to(tl.int64)
        end = tl.load(offsets_ptr + expert, mask=is_owner, other=0).to(tl.int64)
        if CLEARS_TAIL:
            end = tl.where(expert == num_experts, last, end)
        begin = tl.minimum(tl.maximum(begin, 0), last)
        length = tl.maximum(tl.minimum(end, last) - begin, 0)
    count = tl.where(is_owner, length, 0)
    if counts_ptr is not None:
        real = tl.load(counts_ptr + expert, mask=is_owner, other=0).to(tl.int64)
        count = tl.minimum(count, tl.maximum(real, 0))
    visited = count
    if CLEARS_PADDING:
        visited = tl.where(is_owner, length, visited)
    if CLEARS_TAIL:
        visited = tl.where(is_owner, visited, length)
    return begin, visited, count


@triton.jit
def tile_ends(
    offsets_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    num_experts: tl.tensor,
    num_rows: tl.tensor,
    capacity: tl.tensor,
    tiles_across: tl.tensor,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CLEARS_PADDING: tl.constexpr,
    CLEARS_TAIL: tl.constexpr,
) -> tl.tensor:
    """`[BLOCK_EXPERTS]` int32: number of the tile after the last of each segment, where tiles are numbered in order."""
    _, visited, _ = segment_bounds(
        tl.arange(0, BLOCK_EXPERTS),
        offsets_ptr,
        counts_ptr,
        num_experts,
        num_rows,
        capacity,
        CLEARS_PADDING,
        CLEARS_TAIL,
    )
    tiles = ((visited + BLOCK_ROWS - 1) // BLOCK_ROWS).to(tl.int32) * tiles_across
    return tl.cumsum(tiles, 0)


@triton.jit
def locate(
    tile: tl.tensor, tiles_down: tl.tensor, tiles_across: tl.tensor, GROUP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Place of a tile in a matrix of tiles, in an order where neighbours in time share rows and columns.

    GROUP rows of tiles are walked column by column, so that a column is read from memory once for all of them.
    """
    per_group = GROUP * tiles_across
    first = tile // per_group * GROUP
    size = tl.minimum(tiles_down - first, GROUP)
    within = tile % per_group
    return first + within % size, within // size
