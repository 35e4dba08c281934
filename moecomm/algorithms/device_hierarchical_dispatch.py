"""The phases of one dispatch of devices between domains; see device_hierarchical.py for the order."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from moecomm.algorithms.calls import LANE_BEGUN, LANE_CROSSED, LANE_DONE, LANE_GRANTED, Phase
from moecomm.algorithms.device_rails import DeviceRails
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.passage import Passage, to_rails
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
        self.num_topk = routing.topk_idx.shape[1]
        value_bytes = () if topk_weights is None else (topk_weights.element_size() * self.num_topk,)
        self.arrays = (*row_format.plane_bytes, 4 * self.num_topk, *value_bytes)

    def _count(self) -> int:
        return self.rails.count(self.routing.topk_idx)

    def _needs_to_send(self, counts: npt.NDArray[np.int32]) -> list[int]:
        exchange, topology = self.exchange, self.rails.topology
        if self.crossings is None:
            self.crossings = exchange.mailbox.crossings(self.call.sequence, topology.num_domains)
        if not self._is_worth_it(counts, self.crossings):
            self.call.phases = Dispatch._cached_phases if self.cached else Dispatch._phases
            return super()._needs_to_send(counts)
        self.passage = to_rails(topology, exchange.rank, exchange.reach.far, self.crossings, self.arrays)
        return [self.passage.leaving_bytes, self.passage.arriving_bytes]

    def _is_worth_it(self, counts: npt.NDArray[np.int32], crossings: torch.Tensor) -> bool:
        """Whether fewer bytes cross between domains this way; the same on all ranks, who know all counts."""
        direct = self.rails.rails.direct_rows(counts, self.routing.layout) * sum(self.planes)
        over_rails = self.rails.crossing_rows(crossings) * sum(self.arrays)
        return self.exchange.hops.choose("dispatch", self.call.title, direct, over_rails)

    def _passage_offset(self) -> int:
        return 0 if self.passage is None else self.call.blocks[2].offset

    def _cross(self) -> None:
        """Packs what goes to other domains, and puts it to the rails; meanwhile they do the same."""
        exchange, passage = self.exchange, self.passage
        assert passage is not None
        self._look()
        offsets, memory = [grant.passage for grant in self.grants], self.call.blocks[1].address
        blocks = [base + offset for base, offset in zip(exchange.bases, offsets, strict=True)]
        arrays = {part.receiver: passage.sent_arrays(part, memory, blocks) for part in passage.leaving}
        exchange.queue.run(self._pack_for_rails, self.rails.by_domain(arrays))
        exchange.put(memory, passage.runs(offsets))
        exchange.sequencer.signal_all(LANE_CROSSED, self.call)
        exchange.queue.run(self._write_near)

    def _pack_for_rails(self, addresses: list[list[int]]) -> None:
        planes = self.row_format.encode(self.x)
        self.rails.pack(planes, self.routing.topk_idx, self.topk_weights, addresses)

    def _write_near(self) -> None:
        """Writes the rows of my own domain to their places."""
        assert self.routing.routes is not None
        self._write(self.routing._replace(routes=self.rails.near(self.routing.routes)))

    def _forward(self) -> None:
        """Passes on what has come to me as a rail: all sources' devices have put it."""
        exchange, passage = self.exchange, self.passage
        assert passage is not None
        exchange.sequencer.check_notices(self.call)
        start = self.call.blocks[2].address
        for part in passage.arriving:
            if part.num_rows:
                exchange.queue.run(self._forward_part, part.sender, part.num_rows, passage.received_arrays(part, start))
                exchange.hops.forwarded += part.num_rows * self.row_format.row_bytes
        exchange.sequencer.signal_all(LANE_DONE, self.call)

    def _forward_part(self, source: int, num_rows: int, arrays: list[int]) -> None:
        """Writes the rows of one source to their places in my domain."""
        at_ids, *at_weights = arrays[len(self.row_format.plane_bytes) :]
        ids = self.device.view(at_ids, None, torch.int32, (num_rows, self.num_topk))
        weights = None
        if self.topk_weights is not None:
            weights = self.device.view(at_weights[0], None, self.topk_weights.dtype, ids.shape)
        planes = tuple(
            self.device.view(at, None, torch.uint8, (num_rows, nbytes))
            for at, nbytes in zip(arrays, self.row_format.plane_bytes, strict=False)
        )
        self._write_rows(planes, ids, weights, self.rails.routes_of(self.routing, source, ids))

    _phases: ClassVar[tuple[Phase, ...]] = (
        *Dispatch._phases[:2],
        Phase("cross", LANE_GRANTED, _cross),
        Phase("forward", LANE_CROSSED, _forward),
        Dispatch._phases[-1],
    )
    _cached_phases: ClassVar[tuple[Phase, ...]] = (
        Dispatch._cached_phases[0],
        Phase("cross", LANE_BEGUN, _cross),
        *_phases[-2:],
    )
