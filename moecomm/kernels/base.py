"""The contract of the row kernels, and how a route is written.

    T num_tokens   K num_topk   P num_slots (entries of `routes` per token)   H hidden
    E num_experts  R num_ranks  N rows at the receiving rank

`routes` `[T, P]` int64 is the whole truth about where rows go: `rank << 40 | row`, or -1 for nowhere. In the
expert_major layout P = K and there is one entry per (token, k). In the flat layout there is one entry per distinct rank
of the token, ascending by rank, then -1 (P = K). Kernels that move rows look only at `routes`.

`addresses` holds, per rank, the address of row 0 (or value 0) of that rank in the memory of the calling process; 0 for
a rank that no route names. Rows follow each other there without gaps.

Every implementation gives the same bits as `moecomm.kernels.reference`: products and sums are rounded one by one, sums
run in a stated order, and a NaN result is the canonical quiet NaN of its dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["NUM_DOT_LANES", "ROW_BITS", "RowKernels", "make_route", "rank_of", "row_of", "weights_dtype"]

ROW_BITS = 40
"""A route keeps its row in this many low bits and its rank above them."""

NUM_DOT_LANES = 32
"""`scale_dot` adds column c to partial sum c % 32 in ascending order; then j and j + 16 are added, then 8, 4, 2, 1."""


def make_route(rank: int, row: int) -> int:
    """The entry of `routes` that names this row at this rank."""
    return rank << ROW_BITS | row


def rank_of(route: int) -> int:
    """The rank that a route (not -1) names."""
    return route >> ROW_BITS


def row_of(route: int) -> int:
    """The row that a route (not -1) names."""
    return route & ((1 << ROW_BITS) - 1)


def weights_dtype(rows: torch.dtype) -> torch.dtype:
    """The dtype in which weights of such rows are kept and sums of them made: float32; float64 for float64 rows."""
    return torch.float64 if rows is torch.float64 else torch.float32


class RowKernels(Protocol):
    """Row kernels of one device. Caller's mistakes raise ValueError or TypeError naming the argument."""

    def count_routes(self, topk_idx: Tensor, expert_rank: Tensor, num_ranks: int, counts: Tensor) -> int:
        """Counts the rows that each expert and each rank will get from this rank.

        Arguments:
            topk_idx: `[T, K]` int32 or int64, any strides; global expert ids, -1 = no expert.
            expert_rank: `[E]` int32, the rank that hosts each expert.
            num_ranks: R.
            counts: `[E + R]` int32, overwritten: routes per expert, then distinct tokens per rank.

        Returns:
            A fingerprint (63 bits) of the shape and the values of `topk_idx` in their order; it does not depend on
            its dtype or strides.

        Raises:
            ValueError: an id is below -1 or not below E; names token, k, value and the valid range.
        """
        ...

    def plan_expert_major(self, topk_idx: Tensor, expert_rank: Tensor, bases: Tensor) -> Tensor:
        """Gives each (token, k) its row in the expert_major layout.

        Arguments:
            topk_idx: as in `count_routes`.
            expert_rank: as in `count_routes`.
            bases: `[E]` int64, the row of my first route to each expert at its rank; mine follow in (t, k) order.

        Returns:
            routes `[T, K]` int64.
        """
        ...

    def plan_flat(self, topk_idx: Tensor, expert_rank: Tensor, bases: Tensor) -> Tensor:
        """Gives each (token, rank) its row in the flat layout.

        Arguments:
            topk_idx: as in `count_routes`.
            expert_rank: as in `count_routes`.
            bases: `[R]` int64, the row of my first token at each rank; mine follow in token order.

        Returns:
            routes `[T, K]` int64.
        """
        ...

    def push_rows(
        self, rows: Tensor, routes: Tensor, addresses: Sequence[int], *, weights: Tensor | None = None
    ) -> None:
        """Writes each row to all the places that its routes name; earlier stores are ordered before later ones.

        Arguments:
            rows: `[T, H]` any dtype, last dim contiguous, any row stride.
            routes: `[T, P]` int64.
            addresses: of row 0 at each rank; a row takes H * itemsize bytes there.
            weights: `[T, P]` float32 (float64 beside float64 rows); then weight * row is written, computed in that
                dtype and rounded once; for float64, float32, bfloat16 and float16 rows. Weights without a route are
                not read.
        """
        ...

    def push_values(self, values: Tensor, routes: Tensor, addresses: Sequence[int]) -> None:
        """Writes one value per route.

        Arguments:
            values: `[T, P]` float32 or float64.
            routes: `[T, P]` int64.
            addresses: of value 0 at each rank; the value of row n is the nth.
        """
        ...

    def push_flat_metadata(
        self,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        routes: Tensor,
        expert_rank: Tensor,
        expert_local: Tensor,
        idx_addresses: Sequence[int],
        weight_addresses: Sequence[int] | None,
    ) -> None:
        """Writes, for each flat row, which local experts its token chose there, and with which weights.

        Arguments:
            topk_idx: as in `count_routes`.
            topk_weights: `[T, K]` float32 or float64, or None.
            routes: `[T, P]` int64 from `plan_flat`.
            expert_rank: `[E]` int32.
            expert_local: `[E]` int32, each expert's index among those of its rank.
            idx_addresses: of row 0 of `[N, K]` int32 at each rank: local ids, -1 for experts elsewhere.
            weight_addresses: of row 0 of `[N, K]` weights, dtype of topk_weights, at each rank: 0 for experts
                elsewhere. None if and only if topk_weights is None.
        """
        ...

    def combine_rows(
        self, out: Tensor, routes: Tensor, addresses: Sequence[int], *, weights: Tensor | None = None
    ) -> None:
        """Adds up, for each token, the rows that its routes name.

        Arguments:
            out: `[T, H]` float64, float32, bfloat16 or float16, contiguous, overwritten: the sum over p in ascending
                order, from zero, in fp32 (fp64 for fp64), rounded once; zeros for a token without routes.
            routes: `[T, P]` int64.
            addresses: of row 0 at each rank; a row takes H * itemsize bytes there.
            weights: `[T, P]` float32 (float64 beside float64 rows); then weight * row is added (product and sum each
                rounded). Weights without a route are not read.
        """
        ...

    def pull_values(self, routes: Tensor, addresses: Sequence[int], *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Fetches one value per route: the inverse of `push_values`.

        Arguments:
            routes: `[T, P]` int64.
            addresses: of value 0 at each rank.
            dtype: of the values, float32 or float64.

        Returns:
            `[T, P]` of `dtype`; 0 where there is no route.
        """
        ...

    def pull_flat_values(
        self,
        topk_idx: Tensor,
        routes: Tensor,
        expert_rank: Tensor,
        addresses: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Fetches one value per (token, k) from flat rows of K values.

        Arguments:
            topk_idx: as in `count_routes`.
            routes: `[T, P]` int64 from `plan_flat`.
            expert_rank: `[E]` int32.
            addresses: of row 0 of `[N, K]` values at each rank.
            dtype: of the values, float32 or float64.

        Returns:
            `[T, K]` of `dtype`: column k of the token's row at the rank of its expert k; 0 where the id is -1.
        """
        ...

    def scale_dot(self, g: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """What the backward of a weighted sum needs: scaled gradients and the gradients of the weights.

        Arguments:
            g: `[N, H]` float64, float32, bfloat16 or float16, contiguous.
            y: `[N, H]`, dtype of g, contiguous.
            weights: `[N]` float32 (float64 beside float64 rows).

        Returns:
            weights * g `[N, H]`, rounded once; and the sum over columns of g * y `[N]`, made and given in the dtype of
            the weights, in the order stated at `NUM_DOT_LANES`.
        """
        ...
