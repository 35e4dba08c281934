"""The routing decision of one dispatch, and what a dispatch gives."""

from __future__ import annotations

import dataclasses

import torch

from moecomm.algorithms.plan import Layout

__all__ = ["Handle", "Received"]


@dataclasses.dataclass(frozen=True, eq=False)
class Handle:
    """Where the rows of one routing decision go: routing only, no payload and no transport. Reusable.

    T tokens on this rank, K top-k, E experts, R ranks, N rows received here.

    Attributes:
        routes: `[T, K]` int64: rank << 40 | row there, in the order in which combine sums; -1 = nothing.
        topk_idx: `[T, K]` int32: global expert ids, -1 = no expert.
        counts: `[R, E + R]` int32: per source rank its routes per expert, then its distinct tokens per rank.
        stamp: `[2]` int64: number of the dispatch that made it, fingerprint of `topk_idx`.
        layout: `expert_major` or `flat`.
        expert_alignment: each local expert's rows are padded to a multiple of it.
        num_rows: N, padding included.
        communicator: id of the communicator that made it.
    """

    routes: torch.Tensor
    topk_idx: torch.Tensor
    counts: torch.Tensor
    stamp: torch.Tensor
    layout: Layout
    expert_alignment: int
    num_rows: int
    communicator: int

    @property
    def num_tokens(self) -> int:
        """T: tokens of this rank."""
        return self.routes.shape[0]

    @property
    def num_topk(self) -> int:
        """K."""
        return self.routes.shape[1]


@dataclasses.dataclass(frozen=True, eq=False)
class Received:
    """What a dispatch gives to one rank. Rows beyond the real ones (alignment) are zero rows of weight 0.

    Attributes:
        x: `[N, H]`, dtype of the x sent; a view of receive memory that returns when the last tensor on it dies.
        topk_weights: weights that travelled with the rows, float32. expert_major: `[N]`; flat: `[N, K]`, 0 where
            `topk_idx` is -1. None if none were given.
        topk_idx: flat: `[N, K]` int32 local expert ids, -1 = the expert is elsewhere. expert_major: None.
        num_tokens_per_expert: `[E_local]` int32: routes that arrived for each local expert, without padding.
        offsets: `[E_local]` int32: inclusive prefix sums of those, each padded to `expert_alignment`: where each
            expert's rows of `x` end. flat: None, rows are not grouped by expert.
        handle: for `combine`, and for further dispatches with the same routing.
    """

    x: torch.Tensor
    topk_weights: torch.Tensor | None
    topk_idx: torch.Tensor | None
    num_tokens_per_expert: torch.Tensor
    offsets: torch.Tensor | None
    handle: Handle
