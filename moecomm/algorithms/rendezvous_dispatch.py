"""The phases of one rendezvous dispatch; see rendezvous.py for the order."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from moecomm import _C
from moecomm.algorithms.base import Arrival
from moecomm.algorithms.calls import LANE_BEGUN, LANE_DONE, LANE_GRANTED, Call, Phase
from moecomm.algorithms.departure import Departure
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.mailbox import Card, Grant
from moecomm.algorithms.plan import Plan, block_layout, plan_exchange
from moecomm.algorithms.routing import Routing
from moecomm.algorithms.signature import Operation, words_of
from moecomm.codecs.base import RowFormat
from moecomm.devices.queue import OrderedQueue, Tensors
from moecomm.devices.views import tensor_of

__all__ = ["Dispatch"]


class Dispatch:
    """One dispatch of one rank.

    Planes of the receive block, N rows each: those of the row format; flat: local expert ids `[N, K]` int32; then, if
    weights travel, `[N]` or (flat) `[N, K]` weights.

    Arguments:
        exchange: what calls share.
        x: `[T, H]` rows, last dimension contiguous.
        routing: with routes (cached: no counts are exchanged) or without.
        row_format: how rows are written.
        topk_weights: `[T, K]` contiguous, travelling with the rows, or None.
    """

    count_rooms: Tensors | None = None
    route_rooms: Tensors | None = None
    departure: Departure | None = None
    crossings: torch.Tensor | None = None
    grants: list[Grant]

    def __init__(
        self,
        exchange: Exchange,
        x: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        topk_weights: torch.Tensor | None,
    ) -> None:
        self.exchange = exchange
        self.x = x
        self.routing = routing
        self.row_format = row_format
        self.topk_weights = topk_weights
        self.flat = routing.layout == "flat"
        self.cached = routing.routes is not None
        num_topk = routing.topk_idx.shape[1]
        self.planes = row_format.plane_bytes
        if self.flat:
            self.planes += (4 * num_topk,)
        if topk_weights is not None:
            self.planes += (topk_weights.element_size() * (num_topk if self.flat else 1),)
        self.plan: Plan
        self.cards: list[Card] = []
        operation = Operation.CACHED_DISPATCH if self.cached else Operation.DISPATCH
        phases = self._cached_phases if self.cached else self._phases
        words = words_of(routing, row_format, topk_weights)
        self.call = Call(operation, words, phases, self, routing.recording)

    def prepare(self, queue: OrderedQueue) -> None:
        """Before the device's work: room for results, and what must live until it is done."""
        call, routing = self.call, self.routing
        queue.keep(call, self.x, self.topk_weights, routing.topk_idx, routing.routes)
        local, choices = self.exchange.tokens_per_expert.shape, routing.topk_idx.shape
        self.count_rooms = queue.room(call, local, torch.int32), queue.room(call, local, torch.int32)
        if not self.cached:
            self.route_rooms = queue.room(call, choices, torch.int32), queue.room(call, choices, torch.int64)

    def _announce(self) -> None:
        exchange = self.exchange
        self.fingerprint = self._count()
        exchange.sequencer.await_readers(self.call)
        exchange.sequencer.send_card(self.call, self._announcement(), with_counts=True)

    def _count(self) -> int:
        """Leaves my counts where the card takes them from; gives the fingerprint of the ids."""
        exchange = self.exchange
        return exchange.queue.count_routes(
            *(exchange.kernels, self.routing.topk_idx, exchange.expert_rank, exchange.placement.num_ranks),
            exchange.mailbox.counts_out,
        )

    def _announcement(self) -> tuple[int, ...]:
        """What else the card says, up to 2 numbers."""
        return ()

    def _reserve(self, counts: npt.NDArray[np.int32]) -> Grant:
        """Plans, and sets receive memory aside if there is enough.

        Raises:
            CapacityExceeded, ValueError: a rank would receive more rows than fit; on all ranks alike.
        """
        exchange, routing = self.exchange, self.routing
        form = (routing.layout, routing.expert_alignment, routing.capacity)
        try:
            self.plan = plan_exchange(counts, exchange.placement, exchange.rank, *form)
        except ValueError as error:
            self.call.is_agreed_failure = True
            raise type(error)(f"{self.call.title}: {error}") from None
        needs = [block_layout(self.plan.rows_per_rank[exchange.rank], self.planes).nbytes, *self._needs_to_send(counts)]
        exchange.sequencer.release_quarantine()
        limit = exchange.memory.limit
        blocks: list[_C.Block] = []
        for need in needs:
            block = exchange.memory.allocate(need)
            if block is None:
                return Grant(-1, sum(needs), limit, refused=True)
            blocks.append(block)
        # Owned by the call alone, which keeps them from being used again for as long as peers may write to the first.
        self.call.blocks = blocks
        return Grant(blocks[0].offset, sum(needs), limit, False, self._passage_offset())

    def _needs_to_send(self, counts: npt.NDArray[np.int32]) -> list[int]:
        """Bytes of further blocks of receive memory."""
        exchange = self.exchange
        if not exchange.reach.far or exchange.device.is_host:
            return []
        # What a device puts must lie in the memory that all have alike.
        self.departure = Departure(exchange, self.routing._replace(counts=torch.from_numpy(counts)), self.planes)
        return [self.departure.nbytes] if self.departure.nbytes else []

    def _passage_offset(self) -> int:
        """Where what passes through me is to lie, if something does."""
        return 0

    def _grant(self) -> None:
        exchange, routing = self.exchange, self.routing
        counts = exchange.mailbox.counts(self.call.sequence)
        # All the same call, and nobody gave up while the counts were read.
        self.cards = exchange.sequencer.cards(self.call)
        grant = self._reserve(counts)
        advance = exchange.sequencer.advance(LANE_GRANTED, self.call)
        exchange.mailbox.send_grant(self.call.sequence, grant, LANE_GRANTED, advance)
        # The peers can go on from here, so the rest of the planning costs them nothing.
        topk_idx, routes = exchange.queue.make(self.route_rooms, self._route, routing.topk_idx)
        self.routing = Routing(
            topk_idx=topk_idx,
            layout=routing.layout,
            expert_alignment=routing.expert_alignment,
            routes=routes,
            counts=torch.from_numpy(counts),
            capacity=routing.capacity,
            origin=self.call.sequence,
            fingerprint=self.fingerprint,
            crossings=self.crossings,
        )
        self._begin_sending()

    def _begin_sending(self) -> None:
        """What can be sent before the grants are known."""

    def _route(self, topk_idx: torch.Tensor) -> Tensors:
        exchange = self.exchange
        plan_routes = exchange.kernels.plan_flat if self.flat else exchange.kernels.plan_expert_major
        bases = exchange.queue.upload(torch.from_numpy(self.plan.bases))
        # A copy of its own: the handle must not change when the caller reuses its tensor.
        return topk_idx.to(torch.int32, copy=True), plan_routes(topk_idx, exchange.expert_rank, bases)

    def _grant_cached(self) -> None:
        assert self.routing.counts is not None
        self.exchange.sequencer.await_readers(self.call)
        grant = self._reserve(self.routing.counts.numpy())
        said = (*self._announcement(), grant.offset, grant.passage)
        self.exchange.sequencer.send_card(self.call, said, grant.need, grant.limit, refused=grant.refused)

    def _grants(self) -> list[Grant]:
        if not self.cached:
            return self.exchange.sequencer.grants(self.call)
        self.cards = self.exchange.sequencer.cards(self.call)
        place = len(self._announcement())
        return [
            Grant(card.offsets[place], card.need, card.limit, card.refused, card.offsets[place + 1])
            for card in self.cards
        ]

    def _look(self) -> None:
        """Learns where everybody's rows go, and makes the padding here read as nothing."""
        exchange = self.exchange
        self.grants = grants = self._grants()
        for rank, grant in enumerate(grants):
            if grant.refused:
                raise exchange.exceeded(self.call, rank, grant.need, grant.limit)
        self._offsets = [grant.offset for grant in grants]
        self._layouts = [block_layout(rows, self.planes).offsets for rows in self.plan.rows_per_rank]
        bases = [base + offset for base, offset in zip(exchange.bases, self._offsets, strict=True)]
        self._blank_padding(bases[exchange.rank], self._layouts[exchange.rank])
        self.addresses = [
            [base + offsets[plane] for base, offsets in zip(bases, self._layouts, strict=True)]
            for plane in range(len(self.planes))
        ]

    def _push(self) -> None:
        self._look()
        self._push_direct()

    def _push_direct(self) -> None:
        exchange = self.exchange
        assert self.routing.routes is not None
        if exchange.reach.far:
            self._push_far()
        else:
            exchange.queue.run(self._write, self.routing)
        exchange.sequencer.signal_all(LANE_DONE, self.call)

    def _write(self, routing: Routing) -> None:
        """Writes all planes to where the routes say."""
        assert routing.routes is not None
        self._write_rows(self.row_format.encode(self.x), routing.topk_idx, self.topk_weights, routing.routes)

    def _write_rows(
        self, planes: Tensors, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, routes: torch.Tensor
    ) -> None:
        """Writes planes of some tokens, and what belongs to their rows, to where the routes say."""
        kernels, addresses = self.exchange.kernels, self.addresses
        for tensor, where in zip(planes, addresses, strict=False):
            kernels.push_rows(tensor, routes, where)
        rest = addresses[len(planes) :]
        if self.flat:
            kernels.push_flat_metadata(
                topk_idx,
                topk_weights,
                routes,
                expert_rank=self.exchange.expert_rank,
                expert_local=self.exchange.expert_local,
                idx_addresses=rest[0],
                weight_addresses=None if topk_weights is None else rest[1],
            )
        elif topk_weights is not None:
            kernels.push_values(topk_weights, routes, rest[0])

    def _push_far(self) -> None:
        """As `_write`, but what goes to far ranks is packed here and then sent."""
        exchange = self.exchange
        departure = self.departure or Departure(exchange, self.routing, self.planes)
        memory, start = None, 0
        if exchange.device.is_host:
            memory = torch.empty(departure.nbytes, dtype=torch.uint8)
            start = memory.data_ptr()
        elif departure.nbytes:
            start = self.call.blocks[1].address
        departure.readdress(self.addresses, start)
        exchange.queue.run(self._pack, departure)
        exchange.put(start, departure.runs(self._offsets, self._layouts))

    def _pack(self, departure: Departure) -> None:
        self._write(self.routing._replace(routes=departure.routes(self.routing.topk_idx)))

    def _blank_padding(self, base: int, offsets: tuple[int, ...]) -> None:
        """Blanks my rows between the real ones of an expert and its padded end, and those up to the capacity."""
        plan, routing = self.plan, self.routing
        spans: list[tuple[int, int]] = []
        if not self.flat and routing.expert_alignment > 1:
            ends = plan.offsets
            starts = np.concatenate((ends[:1] * 0, ends[:-1])) + plan.num_tokens_per_expert
            spans = [(start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True) if end > start]
        if routing.capacity > plan.num_rows:
            spans.append((plan.num_rows, routing.capacity))
        ids = len(self.row_format.plane_bytes) if self.flat else None
        for plane, (offset, row_bytes) in enumerate(zip(offsets, self.planes, strict=True)):
            if plane != ids:
                self.exchange.queue.zero_rows(base + offset, row_bytes, spans)
            for start, end in spans if plane == ids else ():
                where = base + offset + start * row_bytes, (end - start) * row_bytes
                self.exchange.queue.set_bytes(*where, 0xFF)  # ids of -1

    def _arrive(self) -> None:
        queue = self.exchange.queue
        self.exchange.sequencer.check_notices(self.call)
        num_rows = self.plan.rows_per_rank[self.exchange.rank]
        offsets = block_layout(num_rows, self.planes).offsets
        num_planes = len(self.row_format.plane_bytes)
        num_topk = self.routing.topk_idx.shape[1]
        block = queue.tensors_in(self.call, self.call.blocks[0])
        weights, topk_idx = None, None
        if self.flat:
            topk_idx = tensor_of(block, torch.int32, offsets[num_planes], (num_rows, num_topk))
        if self.topk_weights is not None:
            shape = (num_rows, num_topk) if self.flat else (num_rows,)
            weights = tensor_of(block, self.topk_weights.dtype, offsets[-1], shape)
        self.exchange.count_tokens(self.plan.num_tokens_per_expert)
        counts = torch.from_numpy(self.plan.num_tokens_per_expert), torch.from_numpy(self.plan.offsets)
        num_tokens_per_expert, ends = queue.give(self.count_rooms, counts)
        self.call.result = Arrival(
            x=self.row_format.decode(block, offsets[:num_planes], num_rows),
            topk_weights=weights,
            topk_idx=topk_idx,
            num_tokens_per_expert=num_tokens_per_expert,
            offsets=ends,
            routing=self.routing,
        )
        self.call.blocks = ()

    _phases: ClassVar[tuple[Phase, ...]] = (
        Phase("announce", None, _announce),
        Phase("grant", LANE_BEGUN, _grant, orders_device=False),
        Phase("push", LANE_GRANTED, _push),
        Phase("arrive", LANE_DONE, _arrive),
    )
    _cached_phases: ClassVar[tuple[Phase, ...]] = (
        Phase("grant", None, _grant_cached),
        Phase("push", LANE_BEGUN, _push),
        _phases[-1],
    )
