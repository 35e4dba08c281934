"""Who goes where, as one rank knows it."""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch

from moecomm.algorithms.plan import Layout
from moecomm.devices.registry import find_device
from moecomm.placement import Placement

__all__ = ["DeviceRouting", "Routing"]


@final
class DeviceRouting:
    """What the device alone knows of a routing; the host can ask for it, and then waits.

    Arguments:
        placement: which rank hosts which expert.
        counts: `[R, E + R]` int32 on the device, as in `Routing`.
        placed: for the kernels that bring rows home.
        owner: what keeps all of this from being used for another routing.
    """

    __slots__ = ("_placement", "counts", "owner", "placed")

    def __init__(self, placement: Placement, counts: torch.Tensor, placed: Any, owner: object) -> None:
        self._placement = placement
        self.counts = counts
        self.placed = placed
        self.owner = owner

    def fingerprint_of(self, topk_idx: torch.Tensor) -> int:
        """The fingerprint that `RowKernels.count_routes` gives."""
        placement = self._placement
        counts = torch.empty(placement.num_experts + placement.num_ranks, dtype=torch.int32)
        kernels = find_device(None).row_kernels()
        fingerprint: int = kernels.count_routes(topk_idx.cpu(), placement.expert_rank, placement.num_ranks, counts)
        return fingerprint


class Routing(NamedTuple):
    """Who goes where, as one rank knows it; T tokens, K top-k, E experts, R ranks.

    Attributes:
        topk_idx: `[T, K]` int32 or int64 global expert ids, -1 = no expert.
        layout, expert_alignment: of the rows received.
        routes: `[T, K]` int64, or None before the counts are known.
        counts: `[R, E + R]` int32 on the host, or None before they are known.
        stamp: `[2]` int64 on the host (number of the dispatch, fingerprint of `topk_idx`; then the crossings, where
            there are any), or None: not known, or not made yet.
        capacity: 0 = as many rows as arrive; else the shape is fixed: rows per expert (slab), rows in all. The same on
            all ranks.
        origin, fingerprint: what the stamp says, where that is known without reading a tensor; else None.
        recording: autograd records the call here. Ranks need not agree, but where kernels alone make it.
        is_hosted: the host must know what comes of the call, which is an operator's. On a device all ranks agree.
        on_device: what the device alone knows, with counts and stamp; None: the host knows all.
        mode: which algorithm carries it: `throughput`, or `low_latency`, whose shapes are always fixed.
        crossings: `[R, 2, D]` int32 on the host: tokens of each rank that have an expert in each domain, and rows that
            answer its exact combine from there, see device_answers.py; None: the stamp says, or nobody needs to know,
            see `Session.num_crossings`.
        changed: one int64 on the device: whether a recompute here has routed otherwise than this, so that no rank may
            use what the call brings; None: it has not.
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
    is_hosted: bool = False
    on_device: DeviceRouting | None = None
    mode: str = "throughput"
    crossings: torch.Tensor | None = None
    changed: torch.Tensor | None = None

    def known_to_host(self) -> Routing:
        """The same with counts and stamp on the host, which waits for the device if it has to."""
        known = self.on_device
        if known is None:
            return self
        fingerprint = known.fingerprint_of(self.topk_idx)
        return self._replace(counts=known.counts.cpu(), fingerprint=fingerprint, on_device=None)
