"""Rows between ranks that cannot address each other's memory: packed one behind the other, then put run by run.

"Far" is a rank whose memory has no address here. What goes to far ranks is written to memory of one's own first, and
what comes home from them lands in memory of one's own. Both lie packed: by rank, and inside a rank's part in the order
in which the rows lie there. So one numbering of rows serves the way out and the way home.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from moecomm.algorithms.plan import Layout, block_layout, plan_exchange
from moecomm.kernels.base import RowKernels
from moecomm.placement import Placement
from moecomm.transports.base import Region, Transport

__all__ = ["FarRows", "Reach", "Run"]

Run = tuple[int, int, int]
"""Rows that lie next to each other in both places: first row at the far rank, first packed row, number."""


class Reach:
    """Who can address whom. Construction is collective unless the transport says that everybody can.

    Arguments:
        transport: of the group.
        region: any symmetric region.

    Raises:
        ValueError: one rank can address another that cannot address it.

    Attributes:
        far_from: per rank, the ranks that are far from it, ascending.
        far: those far from me, in the order in which they are served: the ones behind me first, so that the ranks
            spread over different receivers.
        is_complete: nobody is far from anybody.
        is_alone: there are other ranks, and none of them can be addressed from here.
    """

    def __init__(self, transport: Transport, region: Region) -> None:
        ranks, me = range(transport.num_ranks), transport.rank
        self.far_from: list[list[int]] = [[] for _ in ranks]
        if not transport.capabilities.addressable:
            self.far_from = transport.group.all_gather([r for r in ranks if transport.peer(region, r) is None])
            one_way = [(a, b) for a in ranks for b in self.far_from[a] if a not in self.far_from[b]]
            if one_way:
                raise ValueError(
                    f"transport {transport.name}: of these ranks only one can address the other: {one_way}"
                )
        self.far = [(me + step) % len(ranks) for step in ranks if (me + step) % len(ranks) in self.far_from[me]]
        self.is_complete = not any(self.far_from)
        self.is_alone = 0 < len(self.far) == len(ranks) - 1


class FarRows:
    """How one rank's rows to the ranks far from it are packed.

    Arguments:
        counts: `[R, E + R]` int32 of all ranks, see `plan_exchange`.
        placement: which rank hosts which expert.
        source: the rank.
        far: the ranks far from it, ascending.
        layout, expert_alignment, capacity: of the rows at their destinations.

    Attributes:
        starts: `[R]`: the packed row at which each far rank's part begins; 0 for the others.
        sizes: `[R]`: packed rows of each far rank; 0 of the others.
        num_rows: packed rows in all.
    """

    def __init__(
        self,
        counts: npt.NDArray[np.int32],
        placement: Placement,
        source: int,
        far: Sequence[int],
        layout: Layout,
        expert_alignment: int,
        capacity: int = 0,
    ) -> None:
        own = np.zeros_like(counts)
        own[source] = counts[source]
        self._is_flat = layout == "flat"
        there = plan_exchange(counts, placement, source, layout, expert_alignment, capacity)
        packed = plan_exchange(own, placement, source, "flat" if self._is_flat else "expert_major", 1)
        self._far = far
        self._placement = placement
        self._counts = counts[source]
        self._there, self._packed = there.bases, packed.bases
        self.starts, self.sizes = [0] * placement.num_ranks, [0] * placement.num_ranks
        self.num_rows = 0
        for rank in far:
            self.starts[rank] = self.num_rows
            self.sizes[rank] = packed.rows_per_rank[rank]
            self.num_rows += packed.rows_per_rank[rank]

    @property
    def bases(self) -> npt.NDArray[np.int64]:
        """`[E]` (flat: `[R]`), as in `Plan`, but counted from the start of the part for far ranks."""
        is_far = np.zeros(self._placement.num_ranks, dtype=bool)
        is_far[list(self._far)] = True
        return np.where(is_far if self._is_flat else is_far[self._placement.rank_of_expert], self._packed, self._there)

    def routes(
        self, kernels: RowKernels, topk_idx: torch.Tensor, expert_rank: torch.Tensor, bases: torch.Tensor
    ) -> torch.Tensor:
        """`[T, K]` int64: as in a handle of the source, but rows of far ranks are numbered as they are packed.

        Arguments:
            kernels: of the device of the tensors.
            topk_idx: of the source.
            expert_rank: `[E]` int32.
            bases: `self.bases`.
        """
        plan = kernels.plan_flat if self._is_flat else kernels.plan_expert_major
        return plan(topk_idx, expert_rank, bases)

    def runs(self, rank: int) -> list[Run]:
        """The runs of the part of a far rank."""
        start, first_count = self.starts[rank], self._placement.num_experts if self._is_flat else 0
        first, end = (rank, rank + 1) if self._is_flat else self._placement.expert_range(rank)
        there, packed = self._there[first:end].tolist(), self._packed[first:end].tolist()
        counts = self._counts[first_count + first : first_count + end].tolist()
        return [(row, start + place, count) for row, place, count in zip(there, packed, counts, strict=True) if count]

    def addresses(self, memory: int, plane_bytes: Sequence[int]) -> list[dict[int, int]]:
        """Per plane, the address at which each far rank's part begins in `memory`, laid out by `block_layout`."""
        offsets = block_layout(self.num_rows, tuple(plane_bytes)).offsets
        return [
            {rank: memory + offset + self.starts[rank] * nbytes for rank in self._far}
            for offset, nbytes in zip(offsets, plane_bytes, strict=True)
        ]
