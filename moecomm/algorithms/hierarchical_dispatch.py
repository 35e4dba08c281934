"""The phases of one dispatch between domains; see hierarchical.py for the order."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from moecomm.algorithms.calls import LANE_BEGUN, LANE_DONE, LANE_GRANTED, Phase
from moecomm.algorithms.channels import HEADER_BYTES, Channels, Chunk, ChunkForm
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.rails import Entries, RailRoutes, Rails, copy_rows, tensor_at
from moecomm.algorithms.rendezvous_dispatch import Dispatch
from moecomm.algorithms.routing import Routing
from moecomm.algorithms.traffic import Traffic
from moecomm.codecs.base import RowFormat

__all__ = ["HierarchicalDispatch"]

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
        self.is_pushed = False
        # Arrays of a chunk: ids, weights, planes of the rows.
        num_topk = routing.topk_idx.shape[1]
        value_bytes = 0 if topk_weights is None else topk_weights.element_size()
        self.arrays = (rails.id_dtype.itemsize * num_topk, value_bytes * num_topk, *row_format.plane_bytes)
        self.form = ChunkForm(channels.chunk_bytes, self.arrays)
        # What goes to each other domain.
        self.entries: list[Entries] = []
        self.num_pairs = 0

    def _announcement(self) -> tuple[int, ...]:
        if not self.entries:
            self.entries = self.rails.entries(self.routing.topk_idx, self.channels.rails)
            self.num_pairs = sum(len(one.tokens) for one in self.entries)
        return (self.num_pairs,)

    def _costs(self, counts: npt.NDArray[np.int32], num_pairs: int) -> tuple[int, int]:
        """Bytes between domains of either way, from all ranks' counts and pairs or from one's own."""
        direct = self.rails.direct_rows(counts, self.routing.layout) * sum(self.planes)
        return direct, num_pairs * sum(self.arrays)

    def _is_worth_it(self) -> bool:
        """Whether fewer bytes cross between domains this way; the same on all ranks, who know all counts."""
        assert self.routing.counts is not None
        num_pairs = sum(card.offsets[0] for card in self.cards)
        costs = self._costs(self.routing.counts.numpy(), num_pairs)
        return self.exchange.hops.choose("dispatch", self.call.title, *costs, num_pairs * self.row_format.row_bytes)

    def _announce(self) -> None:
        super()._announce()
        self._send_early(self.exchange.mailbox.counts_out.numpy())

    def _grant_cached(self) -> None:
        super()._grant_cached()
        assert self.routing.counts is not None
        self._send_early(self.routing.counts[self.exchange.rank].numpy())

    def _send_early(self, counts: npt.NDArray[np.int32]) -> None:
        """Sends first chunks long before the grants are here, if the call will probably go over rails by my counts.

        If it goes another way after all, nobody takes these chunks.
        """
        # A channel carries its calls one after the other, so nothing may overtake what an earlier call has yet to send.
        is_oldest = self.exchange.sequencer.is_oldest(self.call)
        if is_oldest and self.exchange.hops.prefers_rails(*self._costs(counts, self.num_pairs)):
            self._traffic_out().send(_EARLY_CHUNKS)

    def _begin_sending(self) -> None:
        if self._is_worth_it():
            traffic = self._traffic_out()
            traffic.expect(self._incoming())
            traffic.send()
        else:
            self.traffic = None

    def _stream(self) -> bool:
        sequencer = self.exchange.sequencer
        if not self.is_open:
            self._look()
            self.is_open = True
            if self.cached:
                self._begin_sending()
            if self.traffic is None:
                self._push_direct()
            else:
                # The link is busy; what stays inside the domain is written meanwhile.
                self._write_near()
        if self.traffic is not None and not self.is_pushed:
            self.is_pushed = self.traffic.advance()
            self.call.awaiting = self.traffic.awaited()
            if not self.is_pushed:
                return False
            sequencer.signal_all(LANE_DONE, self.call)
        # Over rails only my own domain writes to my memory.
        writers = range(self.exchange.placement.num_ranks) if self.traffic is None else self.rails.near_ranks
        self.call.awaiting = sequencer.behind(LANE_DONE, self.call, writers)
        return not self.call.awaiting

    def _traffic_out(self) -> Traffic:
        """What I send; made once."""
        if self.traffic is None:
            planes = self.row_format.encode(self.x)
            me = weakref.proxy(self)  # what is left of the traffic of a failed call must not keep its memory
            outgoing = [_RowsOut(me, entries, planes) for entries in self.entries if len(entries.tokens)]
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
        ids = tensor_at(at_ids, self.rails.id_dtype, (chunk.num_rows, num_topk)).to(torch.int32)
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
        Phase("arrive", None, Dispatch._arrive),
    )
    _cached_phases: ClassVar[tuple[Phase, ...]] = (
        Phase("grant", None, _grant_cached),
        Phase("push", LANE_BEGUN, _stream, is_stream=True),
        Phase("arrive", None, Dispatch._arrive),
    )


class _RowsOut:
    """Rows on their way to a rail.

    Arguments:
        dispatch: whose rows they are.
        entries: where they go, and which.
        planes: of the rows of all tokens.
    """

    def __init__(self, dispatch: HierarchicalDispatch, entries: Entries, planes: tuple[torch.Tensor, ...]) -> None:
        self.rail = dispatch.channels.rails[entries.domain]
        self._dispatch = dispatch
        self._ids = entries.ids
        self._tokens = entries.tokens.numpy()
        weights = dispatch.topk_weights
        self._weights = None if weights is None else weights.index_select(0, entries.tokens)
        self._planes = planes
        # Where in its chunk each token's row goes.
        packed = np.full((len(dispatch.x), 1), -1, dtype=np.int64)
        packed[self._tokens, 0] = np.arange(len(self._tokens)) % dispatch.form.most_rows
        self._packed = torch.from_numpy(packed)
        self._next = 0

    def write_next(self, outbox: int) -> tuple[Chunk, int]:
        dispatch, form, tokens = self._dispatch, self._dispatch.form, self._tokens
        begin = self._next
        end = self._next = min(begin + form.most_rows, len(tokens))
        num_rows = end - begin
        at_ids, at_weights, *at_planes = form.addresses(outbox, num_rows)
        copy_rows(self._ids, begin, end, at_ids)
        if self._weights is not None:
            copy_rows(self._weights, begin, end, at_weights)
        reach = slice(int(tokens[begin]), int(tokens[end - 1]) + 1)
        packed = self._packed[reach]
        for plane, address in zip(self._planes, at_planes, strict=True):
            dispatch.exchange.kernels.push_rows(plane[reach], packed, [address])
        nbytes = form.nbytes(num_rows)
        dispatch.exchange.hops.between += HEADER_BYTES + nbytes
        return Chunk(0, num_rows, end == len(tokens), _NOWHERE), nbytes
