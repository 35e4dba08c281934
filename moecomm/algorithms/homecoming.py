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
from moecomm.devices.queue import Tensors
from moecomm.kernels.far_runs import FarRun
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
    """

    def __init__(self, exchange: Exchange, routing: Routing, plane_bytes: Sequence[int]) -> None:
        self._exchange = exchange
        self._routing = routing
        self._plane_bytes = tuple(plane_bytes)
        self._mine = self._rows_of(exchange.rank)
        self.nbytes = block_layout(self._mine.num_rows, self._plane_bytes).nbytes

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

    def make_routes(self) -> Tensors:
        """`[T, K]` int64: as in the handle, but rows of far ranks are numbered as they land; by the device's work."""
        return (self._exchange.far_routes(self._mine, self._routing.topk_idx),)

    def send(self, sources: Sequence[int], region: Region, landings: Sequence[int]) -> None:
        """Sends the rows of far ranks' tokens home.

        Arguments:
            sources: addresses of the planes, rows in the order of the handle; on a device, in receive memory.
            region: where they land; on a device, receive memory.
            landings: per rank, the offset of its memory for them.
        """
        for home in self._exchange.reach.far:
            self.send_to(home, sources, region, landings[home])

    def send_to(self, home: int, sources: Sequence[int], region: Region, landing: int) -> None:
        """Sends the rows of one far rank's tokens."""
        exchange, theirs = self._exchange, self._rows_of(home)
        offsets = block_layout(theirs.num_rows, self._plane_bytes).offsets
        runs = theirs.runs(exchange.rank)
        for source, offset, nbytes in zip(sources, offsets, self._plane_bytes, strict=True):
            if not nbytes:
                continue
            if exchange.device.is_host:
                self._put(source, nbytes, region, landing + offset, runs, home)
            else:
                exchange.put(source, runs_of_rows(home, landing + offset, runs, nbytes))

    def pack_for(self, home: int, sources: Sequence[int], address: int, room: int) -> int:
        """Writes the rows of one far rank's tokens behind each other, if there is room; gives their bytes."""
        theirs, me = self._rows_of(home), self._exchange.rank
        offsets, total = block_layout(theirs.sizes[me], self._plane_bytes)
        if total > room:
            return total
        runs = theirs.runs(me)
        for rows, offset, nbytes in zip(sources, offsets, self._plane_bytes, strict=True):
            to = address + offset
            for first, _, count in runs:
                ctypes.memmove(to, rows + first * nbytes, count * nbytes)
                to += count * nbytes
        self._exchange.hops.between += total
        return total

    def _put(self, rows: int, row_bytes: int, region: Region, landing: int, runs: Sequence[Run], home: int) -> None:
        """Puts runs that lie apart here and behind each other at home; short ones together, as one message."""
        transport = self._exchange.transport
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


def runs_of_rows(home: int, landing: int, runs: Sequence[Run], row_bytes: int) -> list[FarRun]:
    """Runs of rows that lie apart here and behind each other from offset `landing` on at home."""
    return [
        FarRun(home, landing + there * row_bytes, here * row_bytes, count * row_bytes) for here, there, count in runs
    ]
