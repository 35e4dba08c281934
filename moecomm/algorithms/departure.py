"""Rows that leave for far ranks in a dispatch: packed in memory of one's own, then put to their places, run by run.

The way out of what `homecoming.py` brings back; see `far_rows.py` for the packing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.far_rows import FarRows
from moecomm.algorithms.plan import block_layout
from moecomm.algorithms.routing import Routing
from moecomm.kernels.far_runs import FarRun

__all__ = ["Departure"]


class Departure:
    """The far rows of one dispatch of one rank.

    Arguments:
        exchange: what calls share.
        routing: of the call, with counts.
        plane_bytes: bytes per row of each plane.

    Attributes:
        nbytes: memory that they are packed in.
    """

    def __init__(self, exchange: Exchange, routing: Routing, plane_bytes: tuple[int, ...]) -> None:
        assert routing.counts is not None
        self._exchange = exchange
        self._plane_bytes = plane_bytes
        self._rows = FarRows(
            routing.counts.numpy(),
            exchange.placement,
            exchange.rank,
            exchange.reach.far_from[exchange.rank],
            routing.layout,
            routing.expert_alignment,
        )
        self._offsets, self.nbytes = block_layout(self._rows.num_rows, plane_bytes)

    def routes(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """`[T, K]` int64: as the call's own, but rows of far ranks are numbered as they are packed; by its work."""
        return self._exchange.far_routes(self._rows, topk_idx)

    def readdress(self, addresses: list[list[int]], memory: int) -> None:
        """Replaces, by plane and rank, the addresses of far ranks' rows by those of where they are packed."""
        for where, parts in zip(addresses, self._rows.addresses(memory, self._plane_bytes), strict=True):
            for rank, part in parts.items():
                where[rank] = part

    def runs(self, blocks: Sequence[int], layouts: Sequence[Sequence[int]]) -> list[FarRun]:
        """What is put, counted from where the packing begins.

        Arguments:
            blocks: by rank, the offset of what it has granted.
            layouts: by rank and plane, the offset of the plane in that.
        """
        return [
            FarRun(rank, blocks[rank] + plane + there * nbytes, offset + here * nbytes, count * nbytes)
            for rank in self._exchange.reach.far
            for offset, plane, nbytes in zip(self._offsets, layouts[rank], self._plane_bytes, strict=True)
            if nbytes
            for there, here, count in self._rows.runs(rank)
        ]
