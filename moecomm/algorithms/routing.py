"""Who goes where, as one rank knows it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moecomm.algorithms.plan import Layout

__all__ = ["Routing"]


class Routing(NamedTuple):
    """Who goes where, as one rank knows it; T tokens, K top-k, E experts, R ranks.

    Attributes:
        topk_idx: `[T, K]` int32 or int64 global expert ids, -1 = no expert.
        layout, expert_alignment: of the rows received.
        routes: `[T, K]` int64, or None before the counts are known.
        counts: `[R, E + R]` int32 on the host, or None before they are known.
        stamp: `[2]` int64 on the host (number of the dispatch, fingerprint of `topk_idx`), or None: not known, or not
            made yet.
        capacity: 0 = as many rows as arrive; else the shape is fixed: rows per expert (slab), rows in all. The same on
            all ranks.
        origin, fingerprint: what the stamp says, where that is known without reading a tensor; else None.
        recording: autograd records the call here. Ranks need not agree.
        mode: which algorithm carries it: `throughput`, or `low_latency`, whose shapes are always fixed.
    """

    topk_idx: torch.Tensor
    layout: Layout
    expert_alignment: int
    routes: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    stamp: torch.Tensor | None = None
    capacity: int = 0
    origin: int | None = None
    fingerprint: int | None = None
    recording: bool = False
    mode: str = "throughput"
