"""The phases of one dispatch between domains; see hierarchical.py for the order."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch

from moecomm.algorithms.calls import LANE_BEGUN, LANE_DONE, LANE_GRANTED, Phase
from moecomm.algorithms.channels import HEADER_BYTES, Channels, Chunk, ChunkForm
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.rails import Entries, RailRoutes, Rails, tensor_at
from moecomm.algorithms.rendezvous_dispatch import Dispatch
from moecomm.algorithms.routing import Routing
from moecomm.algorithms.traffic import Traffic
from moecomm.codecs.base import RowFormat

__all__ = ["HierarchicalDispatch"]

_ID_BYTES = 4
_NOWHERE = (0, 0)
# Sent to each rail before it is known whether the call goes over rails; a call that begins never waits.
_EARLY_CHUNKS = 4


class HierarchicalDispatch(Dispatch):
    """One dispatch of one rank: a row per token and other domain to the rail there, which writes it to its places.

    Arguments:
        exchange, x, routing, row_format, topk_weights: as for `Dispatch`.
        channels: to and from the rails.
        rails: who is where.
    """

    def __init__(
        self,
        exchange: Exchange,
        x: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        topk_weights: torch.Tensor | None,
        channels: Channels,
        rails: Rails,
    ) -> None:
        super().__init__(exchange, x, routing, row_format, topk_weights)
        self.channels = channels
        self.rails = rails
        self.traffic: Traffic | None = None
        self.is_open = False
        # Arrays of a chunk: ids, weights, planes of the rows.
        num_topk = routing.topk_idx.shape[1]
        value_bytes = 0 if topk_weights is None else topk_weights.element_size()
        self.arrays = (_ID_BYTES * num_topk, value_bytes * num_topk, *row_format.plane_bytes)
        self.form = ChunkForm(channels.chunk_bytes, self.arrays)
        self.num_pairs: int | None = None

    def _announcement(self) -> tuple[int, ...]:
        if self.num_pairs is None:
            self.domains = self.rails.domains_of(self.routing.topk_idx)
            concerned = self.rails.concerned(self.domains)
            self.num_pairs = int(concerned.sum() - concerned[:, self.rails.domain].sum())
        return (self.num_pairs,)

    def _is_worth_it(self) -> bool:
        """Whether fewer bytes cross between domains this way; the same on all ranks, who know all counts."""
        routing = self.routing
        assert routing.counts is not None
        direct = self.rails.direct_rows(routing.counts.numpy(), routing.layout) * sum(self.planes)
        pairs = sum(card.offsets[0] for card in self.cards)
        return self.exchange.hops.choose("dispatch", self.call.title, direct, pairs * sum(self.arrays))

    def _announce(self) -> None:
        super()._announce()
        # A channel carries its calls one after the other, so nothing may overtake what an earlier call has yet to send.
        if self.exchange.sequencer.is_oldest(self.call) and self.exchange.hops.expects_rails("dispatch"):
            # Long before the grants are here. If the call goes another way after all, nobody takes these chunks.
            self._traffic_out().send(_EARLY_CHUNKS)

    def _begin_sending(self) -> None:
        if self._is_worth_it():
            traffic = self._traffic_out()
            traffic.expect(self._incoming())
            traffic.send()
        else:
            self.traffic = None

    def _stream(self) -> bool:
        if not self.is_open:
            self._look()
            self.is_open = True
            if self.cached:
                self._begin_sending()
            if self.traffic is None:
                self._push_direct()
                return True
            # The link is busy; what stays inside the domain is written meanwhile.
            self._write_near()
        assert self.traffic is not None
        is_finished = self.traffic.advance()
        self.call.awaiting = self.traffic.awaited()
        if is_finished:
            self.exchange.sequencer.signal_all(LANE_DONE, self.call)
        return is_finished

    def _traffic_out(self) -> Traffic:
        """What I send; made once."""
        if self.traffic is None:
            planes = self.row_format.encode(self.x)
            me = weakref.proxy(self)  # what is left of the traffic of a failed call must not keep its memory
            outgoing = []
            for domain, rail in self.channels.rails.items():
                entries = self.rails.per_token(self.routing.topk_idx, domain, self.domains)
                if len(entries.tokens):
                    outgoing.append(_RowsOut(me, rail, entries, planes))
            self.traffic = Traffic(self.channels, self.call.sequence, outgoing)
        return self.traffic

    def _incoming(self) -> dict[int, Callable[[Chunk], None]]:
        rails, routing = self.rails, self.routing
        assert routing.counts is not None
        counts, me = routing.counts.numpy(), weakref.proxy(self)
        return {
            source: partial(
                type(self)._forward, me, RailRoutes(self.exchange.kernels, rails.placement, routing, source)
            )
            for source in self.channels.sources
            if rails.concerns(counts, source, rails.domain)
        }

    def _write_near(self) -> None:
        """Writes the rows of my own domain to their places."""
        assert self.routing.routes is not None
        self._write(self.routing._replace(routes=self.rails.near(self.routing.routes)))

    def _forward(self, there: RailRoutes, chunk: Chunk) -> None:
        """Writes the rows of a chunk to their places in my domain."""
        exchange, num_topk = self.exchange, self.routing.topk_idx.shape[1]
        kernels, placement = exchange.kernels, exchange.placement
        at_ids, at_weights, *at_planes = self.form.addresses(chunk.address, chunk.num_rows)
        ids = tensor_at(at_ids, torch.int32, (chunk.num_rows, num_topk))
        weights = None
        if self.topk_weights is not None:
            weights = tensor_at(at_weights, self.topk_weights.dtype, (chunk.num_rows, num_topk))
        routes = there.next_routes(ids)
        for address, nbytes, where in zip(at_planes, self.row_format.plane_bytes, self.addresses, strict=False):
            kernels.push_rows(tensor_at(address, torch.uint8, (chunk.num_rows, nbytes)), routes, where)
            exchange.hops.forwarded += chunk.num_rows * nbytes
        rest = self.addresses[len(at_planes) :]
        if self.flat:
            kernels.push_flat_metadata(
                ids,
                weights,
                routes,
                expert_rank=placement.expert_rank,
                expert_local=placement.expert_local,
                idx_addresses=rest[0],
                weight_addresses=None if weights is None else rest[1],
            )
        elif weights is not None:
            kernels.push_values(weights, routes, rest[0])

    _phases: ClassVar[tuple[Phase, ...]] = (
        Phase("announce", None, _announce),
        Dispatch._phases[1],
        Phase("push", LANE_GRANTED, _stream, is_stream=True),
        Dispatch._phases[-1],
    )
    _cached_phases: ClassVar[tuple[Phase, ...]] = (
        Dispatch._cached_phases[0],
        Phase("push", LANE_BEGUN, _stream, is_stream=True),
        Dispatch._phases[-1],
    )


class _RowsOut:
    """Rows on their way to a rail.

    Arguments:
        dispatch: whose rows they are.
        rail: to whom they go.
        entries: which tokens.
        planes: of the rows of all tokens.
    """

    def __init__(
        self, dispatch: HierarchicalDispatch, rail: int, entries: Entries, planes: tuple[torch.Tensor, ...]
    ) -> None:
        self.rail = rail
        self._dispatch = dispatch
        self._entries = entries
        self._planes = planes
        self._next = 0

    def write_next(self, outbox: int) -> tuple[Chunk, int]:
        dispatch, entries, form = self._dispatch, self._entries, self._dispatch.form
        begin = self._next
        end = self._next = min(begin + form.most_rows, len(entries.tokens))
        num_rows = end - begin
        tokens = entries.tokens[begin:end]
        at_ids, at_weights, *at_planes = form.addresses(outbox, num_rows)
        tensor_at(at_ids, torch.int32, entries.ids[begin:end].shape).copy_(entries.ids[begin:end])
        if dispatch.topk_weights is not None:
            weights = dispatch.topk_weights[tokens]
            tensor_at(at_weights, weights.dtype, weights.shape).copy_(weights)
        first, last = int(tokens[0]), int(tokens[-1])
        packed = torch.full((last + 1 - first, 1), -1, dtype=torch.int64)
        packed[tokens - first, 0] = torch.arange(num_rows)
        for plane, address in zip(self._planes, at_planes, strict=True):
            dispatch.exchange.kernels.push_rows(plane[first : last + 1], packed, [address])
        nbytes = form.nbytes(num_rows)
        dispatch.exchange.hops.between += HEADER_BYTES + nbytes
        return Chunk(0, num_rows, end == len(entries.tokens), _NOWHERE), nbytes
