"""Rows that come home from far ranks in a combine: where they land, and who sends them there.

A rank whose rows cannot be read where they are sends them to the ranks they belong to, which keep packed memory for
them (see far_rows.py) and then sum as if the rows lay at their owners.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.far_rows import FarRows, Run
from moecomm.algorithms.plan import block_layout
from moecomm.algorithms.routing import Routing
from moecomm.transports.base import Region

__all__ = ["Homecoming"]

# A message costs as much as copying about that many bytes.
_TOGETHER_BYTES = 128 << 10


class Homecoming:
    """The far rows of one combine of one rank.

    Arguments:
        exchange: what calls share.
        routing: complete.
        plane_bytes: bytes per row of each plane.

    Attributes:
        nbytes: memory that my rows from far ranks need.
        routes: `[T, K]` int64: as in the handle, but rows of far ranks are numbered as they land.
    """

    def __init__(self, exchange: Exchange, routing: Routing, plane_bytes: Sequence[int]) -> None:
        self._exchange = exchange
        self._routing = routing
        self._plane_bytes = tuple(plane_bytes)
        self._mine = self._rows_of(exchange.rank)
        self.nbytes = block_layout(self._mine.num_rows, self._plane_bytes).nbytes
        self.routes = self._mine.routes(exchange.kernels, routing.topk_idx)

    def _rows_of(self, source: int) -> FarRows:
        exchange, routing = self._exchange, self._routing
        assert routing.counts is not None
        return FarRows(
            routing.counts.numpy(),
            exchange.placement,
            source,
            exchange.reach.far_from[source],
            routing.layout,
            routing.expert_alignment,
            routing.capacity,
        )

    def send(self, planes: Sequence[torch.Tensor], region: Region, landings: Sequence[int]) -> None:
        """Sends the rows of far ranks' tokens home.

        Arguments:
            planes: contiguous, rows in the order of the handle.
            region: where they land.
            landings: per rank, the offset of its memory for them.
        """
        for home in self._exchange.reach.far:
            self.send_to(home, planes, region, landings[home])

    def send_to(self, home: int, planes: Sequence[torch.Tensor], region: Region, landing: int) -> None:
        """Sends the rows of one far rank's tokens."""
        theirs = self._rows_of(home)
        offsets = block_layout(theirs.num_rows, self._plane_bytes).offsets
        runs = theirs.runs(self._exchange.rank)
        for plane, offset, nbytes in zip(planes, offsets, self._plane_bytes, strict=True):
            if nbytes:
                self._put(plane, nbytes, region, landing + offset, runs, home)

    def pack_for(self, home: int, planes: Sequence[torch.Tensor], address: int, room: int) -> int:
        """Writes the rows of one far rank's tokens behind each other, if there is room; gives their bytes."""
        theirs, me = self._rows_of(home), self._exchange.rank
        offsets, total = block_layout(theirs.sizes[me], self._plane_bytes)
        if total > room:
            return total
        runs = theirs.runs(me)
        for plane, offset, nbytes in zip(planes, offsets, self._plane_bytes, strict=True):
            rows, to = plane.data_ptr(), address + offset
            for first, _, count in runs:
                ctypes.memmove(to, rows + first * nbytes, count * nbytes)
                to += count * nbytes
        self._exchange.hops.between += total
        return total

    def _put(
        self, plane: torch.Tensor, row_bytes: int, region: Region, landing: int, runs: Sequence[Run], home: int
    ) -> None:
        """Puts runs that lie apart here and behind each other at home; short ones together, as one message."""
        transport, rows = self._exchange.transport, plane.data_ptr()
        self._exchange.hops.between += row_bytes * sum(count for _, _, count in runs)
        begin = 0
        while begin < len(runs):
            end, num_rows = begin + 1, runs[begin][2]
            while end < len(runs) and (num_rows + runs[end][2]) * row_bytes <= _TOGETHER_BYTES:
                num_rows += runs[end][2]
                end += 1
            here, there, _ = runs[begin]
            source, together = rows + here * row_bytes, None
            if end > begin + 1:
                together = torch.empty(num_rows * row_bytes, dtype=torch.uint8)
                source = to = together.data_ptr()
                for first, _, count in runs[begin:end]:
                    ctypes.memmove(to, rows + first * row_bytes, count * row_bytes)
                    to += count * row_bytes
            transport.put(region, landing + there * row_bytes, source, num_rows * row_bytes, home)
            begin = end

    def readdress(self, addresses: list[list[int]], landing: int) -> None:
        """Replaces, by plane and rank, the addresses of far ranks' rows by those of where they have landed."""
        for where, parts in zip(addresses, self._mine.addresses(landing, self._plane_bytes), strict=True):
            for rank, part in parts.items():
                where[rank] = part

    def readdress_packed(self, addresses: list[list[int]], packed: Sequence[int], room: int) -> None:
        """The same for ranks whose rows fit into `room`, which `pack_for` has written: where those begin, by rank."""
        for rank in self._exchange.reach.far:
            offsets, total = block_layout(self._mine.sizes[rank], self._plane_bytes)
            if total <= room:
                for where, offset in zip(addresses, offsets, strict=True):
                    where[rank] = packed[rank] + offset
