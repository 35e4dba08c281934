"""The phases of one dispatch of devices between domains; see device_hierarchical.py for the order."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from moecomm.algorithms.calls import LANE_BEGUN, LANE_CROSSED, LANE_DONE, LANE_GRANTED, Phase, device_count
from moecomm.algorithms.device_rails import DeviceRails
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.passage import Part, Passage, pieces_of, to_rails
from moecomm.algorithms.rendezvous_dispatch import Dispatch
from moecomm.algorithms.routing import Routing
from moecomm.codecs.base import RowFormat
from moecomm.devices.base import AsynchronousDevice

__all__ = ["DeviceHierarchicalDispatch"]


class DeviceHierarchicalDispatch(Dispatch):
    """One dispatch of one rank: a row per token and other domain to the rail there, whose device passes it on.

    Arguments:
        exchange, x, routing, row_format, topk_weights: as for `Dispatch`.
        rails: who is where.
    """

    passage: Passage | None = None

    def __init__(
        self,
        exchange: Exchange,
        x: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        topk_weights: torch.Tensor | None,
        rails: DeviceRails,
    ) -> None:
        super().__init__(exchange, x, routing, row_format, topk_weights)
        self.rails = rails
        assert isinstance(exchange.device, AsynchronousDevice)
        self.device: AsynchronousDevice = exchange.device
        self.crossings = rails.crossings_of(routing)
        # Arrays of a part: planes of the rows, ids, weights.
        self.num_planes = len(row_format.plane_bytes)
        self.num_topk = routing.topk_idx.shape[1]
        value_bytes = () if topk_weights is None else (topk_weights.element_size() * self.num_topk,)
        self.arrays = (*row_format.plane_bytes, 4 * self.num_topk, *value_bytes)
        self.expected: dict[int, Part] | None = None  # by source, what I have yet to pass on
        self.rail_routes: dict[int, torch.Tensor] = {}  # by source

    def _count(self) -> int:
        return self.rails.count(self.routing.topk_idx, self.routing.layout)

    def _needs_to_send(self, counts: npt.NDArray[np.int32]) -> list[int]:
        exchange, topology = self.exchange, self.rails.topology
        if self.crossings is None:
            self.crossings = exchange.mailbox.crossings(self.call.sequence, topology.num_domains)
        num_tokens = self.crossings[:, 0]
        if not self._is_worth_it(counts, num_tokens):
            self.call.phases = Dispatch._cached_phases if self.cached else Dispatch._phases
            return super()._needs_to_send(counts)
        self.passage = to_rails(topology, exchange.rank, exchange.reach.far, num_tokens, self.arrays)
        self.call.followed = self.rails.followed((LANE_BEGUN, LANE_GRANTED), self.passage)
        return [self.passage.leaving_bytes, self.passage.arriving_bytes]

    def _is_worth_it(self, counts: npt.NDArray[np.int32], num_tokens: torch.Tensor) -> bool:
        """Whether fewer bytes cross between domains this way; the same on all ranks, who know all counts."""
        direct = self.rails.rails.direct_rows(counts, self.routing.layout) * sum(self.planes)
        num_rows = self.rails.crossing_rows(num_tokens)
        costs = (direct, num_rows * sum(self.arrays), num_rows * self.row_format.row_bytes)
        return self.exchange.hops.choose("dispatch", self.call.title, *costs)

    def _passage_offset(self) -> int:
        return 0 if self.passage is None else self.call.blocks[2].offset

    def _cross(self) -> None:
        """Packs what goes to other domains, and puts it to the rails; meanwhile writes what stays in my own."""
        exchange, passage = self.exchange, self.passage
        assert passage is not None
        self._look()
        offsets, memory = [grant.passage for grant in self.grants], self.call.blocks[1].address
        blocks = [base + offset for base, offset in zip(exchange.bases, offsets, strict=True)]
        arrays = {part.receiver: passage.sent_arrays(part, memory, blocks) for part in passage.leaving}
        exchange.queue.run(self._pack_for_rails, self.rails.by_domain(arrays))
        sequence, num_pieces = self.call.sequence, pieces_of(passage.leaving_bytes)
        for piece in range(num_pieces):
            exchange.put(memory, passage.piece(piece, num_pieces, offsets, self.num_planes), beside=True)
            self.rails.queue.signal_all(LANE_CROSSED, device_count(LANE_CROSSED, sequence, piece, num_pieces))
        exchange.sequencer.signal_all(LANE_CROSSED, self.call)
        exchange.queue.run(self._write_near)

    def _pack_for_rails(self, addresses: list[list[int]]) -> None:
        planes = self.row_format.encode(self.x)
        self.rails.pack(planes, self.routing.topk_idx, self.topk_weights, addresses)

    def _write_near(self) -> None:
        """Writes the rows of my own domain to their places."""
        assert self.routing.routes is not None
        self._write(self.routing._replace(routes=self.rails.near(self.routing.routes)))

    def _forward(self) -> bool:
        """Passes on what comes to me as a rail from those whose hosts have given their devices the puts."""
        passage = self.passage
        assert passage is not None
        if self.expected is None:
            self.at_passage = self.call.blocks[2].address
            first_to_come = sorted(passage.arriving, key=lambda part: part.step)
            self.expected = {part.sender: part for part in first_to_come if part.num_rows}
        for source in self.rails.come(self.call, LANE_CROSSED, self.expected):
            self._forward_part(self.expected.pop(source), pieces_of(passage.arriving_bytes))
        if self.expected:
            return False
        self.exchange.sequencer.signal_all(LANE_DONE, self.call)
        return True

    def _forward_part(self, part: Part, num_pieces: int) -> None:
        """Passes on what comes from one source, piece by piece, whatever others still put."""
        assert self.passage is not None
        queue, source, sequence = self.rails.queue, part.sender, self.call.sequence
        for piece in range(num_pieces):
            for _, share in self.passage.shares([part], piece, num_pieces):
                queue.wait_beside(source, LANE_CROSSED, device_count(LANE_CROSSED, sequence, piece, num_pieces))
                queue.run_beside(source, self._forward_share, part, share)
                self.exchange.hops.forwarded += len(share) * self.row_format.row_bytes

    def _forward_share(self, part: Part, share: range) -> None:
        """Writes rows of one source, a range of what comes from it, to their places in my domain."""
        assert self.passage is not None
        arrays = self.passage.received_arrays(part, self.at_passage)
        rows = slice(share.start, share.stop)
        ids, weights = self._chosen(part.num_rows, arrays[self.num_planes :])
        if share.start == 0:  # all ids have come with these
            self.rail_routes[part.sender] = self.rails.routes_of(self.routing, part.sender, ids)
        planes = tuple(
            self.device.view(at, None, torch.uint8, (part.num_rows, nbytes))[rows]
            for at, nbytes in zip(arrays, self.row_format.plane_bytes, strict=False)
        )
        routes = self.rail_routes[part.sender][rows]
        self._write_rows(planes, ids[rows], None if weights is None else weights[rows], routes)

    def _chosen(self, num_rows: int, addresses: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[n, K]` ids and weights that have come from a source."""
        ids = self.device.view(addresses[0], None, torch.int32, (num_rows, self.num_topk))
        if self.topk_weights is None:
            return ids, None
        return ids, self.device.view(addresses[1], None, self.topk_weights.dtype, ids.shape)

    _phases: ClassVar[tuple[Phase, ...]] = (
        *Dispatch._phases[:2],
        Phase("cross", LANE_GRANTED, _cross),
        Phase("forward", None, _forward, is_stream=True),
        Dispatch._phases[-1],
    )
    _cached_phases: ClassVar[tuple[Phase, ...]] = (
        Dispatch._cached_phases[0],
        Phase("cross", LANE_BEGUN, _cross),
        *_phases[-2:],
    )
