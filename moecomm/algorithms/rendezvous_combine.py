"""The phases of one rendezvous combine; see rendezvous.py for the order."""

from __future__ import annotations

import math

import torch

from moecomm import _C
from moecomm.algorithms.base import Returned
from moecomm.algorithms.calls import LANE_BEGUN, LANE_DONE, LANE_GRANTED, Call, Phase
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.homecoming import Homecoming
from moecomm.algorithms.mailbox import MAX_PLANES, Card
from moecomm.algorithms.plan import plan_exchange
from moecomm.algorithms.routing import Routing
from moecomm.algorithms.signature import Operation, words_of
from moecomm.codecs.base import RowFormat
from moecomm.devices.queue import OrderedQueue, Tensors
from moecomm.errors import MemoryLimitExceeded

__all__ = ["Combine"]


class Combine:
    """One combine of one rank.

    Peers read rows where they lie, which must be receive memory; rows for far ranks are sent to them, to memory that
    they have set aside and named on their cards.

    Arguments:
        exchange: what calls share.
        y: `[N, H]` contiguous rows of the local experts.
        routing: complete.
        row_format: how rows are written.
        topk_weights: `[T, K]` contiguous, applied at home, or None.
        values: `[N]` or (flat) `[N, K]` contiguous, brought home route by route, or None.
        per_host: the ranks must agree on it.
    """

    out: torch.Tensor | None = None
    home: Tensors | None = None
    far_rooms: Tensors | None = None

    def __init__(
        self,
        exchange: Exchange,
        y: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        *,
        topk_weights: torch.Tensor | None,
        values: torch.Tensor | None,
        per_host: bool = False,
    ) -> None:
        self.exchange = exchange
        self.routing = routing
        self.row_format = row_format
        self.topk_weights = topk_weights
        self.values = values
        if routing.capacity and routing.mode == "throughput":
            num_rows = self._num_rows(routing)  # what is beyond them need not be brought to where peers can read it
            y, values = y[:num_rows], None if values is None else values[:num_rows]
        self.planes = row_format.encode(y)
        if values is not None:
            self.planes += (values,)
        self.far: Homecoming | None = None
        phases: tuple[Phase, ...] = self._phases
        if not exchange.reach.is_complete:
            phases = self._far_phases
            plane_bytes = row_format.plane_bytes
            if values is not None:
                plane_bytes += (values.element_size() * math.prod(values.shape[1:]),)
            self.far = Homecoming(exchange, routing, plane_bytes)
        words = words_of(routing, row_format, values, weighted=topk_weights is not None, per_host=per_host)
        self.call = Call(Operation.COMBINE, words, phases, self, routing.recording)

    def _num_rows(self, routing: Routing) -> int:
        assert routing.counts is not None
        placement, form = self.exchange.placement, (routing.layout, routing.expert_alignment, routing.capacity)
        return plan_exchange(routing.counts.numpy(), placement, self.exchange.rank, *form).num_rows

    def prepare(self, queue: OrderedQueue) -> None:
        """Before the device's work: room for results, and what must live until it is done."""
        call, shape = self.call, self.routing.topk_idx.shape
        queue.keep(call, *self.planes, self.topk_weights, self.routing.topk_idx, self.routing.routes)
        self.out = queue.room(call, (shape[0], self.row_format.hidden), self.row_format.dtype)
        if self.values is not None:
            self.home = (queue.room(call, shape, self.values.dtype),)
        if self.far is not None:
            self.far_rooms = (queue.room(call, shape, torch.int64),)

    def _ready(self) -> None:
        exchange = self.exchange
        exchange.sequencer.await_readers(self.call)
        exchange.sequencer.release_quarantine()
        offsets, self.call.blocks, need = exchange.memory.share(self.planes)
        exchange.sequencer.send_card(self.call, offsets, need, exchange.memory.limit, refused=need > 0)

    def _ready_far(self) -> None:
        exchange = self.exchange
        exchange.sequencer.await_readers(self.call)
        exchange.sequencer.release_quarantine()
        offsets: tuple[int, ...] = (0,) * len(self.planes)
        need = 0
        self.sources = [plane.data_ptr() for plane in self.planes]
        if not exchange.reach.is_alone or not exchange.device.is_host:
            offsets, self.call.blocks, need = self._share()
        if not exchange.device.is_host:
            # What a device puts must lie in the memory that all have alike.
            self.sources = [exchange.memory.region.address + offset for offset in offsets]
        self.landing: _C.Block | None = None
        nbytes = self._landing_bytes()
        if nbytes and not need:
            self.landing = exchange.memory.allocate(nbytes)
            if self.landing is None:
                need = nbytes
            else:
                self.call.blocks = [*self.call.blocks, self.landing]
        said = (self._announcement(), self.landing.offset if self.landing else 0)
        offsets += (0,) * (MAX_PLANES - len(said) - len(offsets)) + said
        exchange.sequencer.send_card(self.call, offsets, need, exchange.memory.limit, refused=need > 0)

    def _share(self) -> tuple[tuple[int, ...], list[_C.Block], int]:
        """Brings my rows where peers can read them; see `ReceiveMemory.share`."""
        return self.exchange.memory.share(self.planes)

    def _landing_bytes(self) -> int:
        """Memory that what comes from far ranks lands in."""
        assert self.far is not None
        return self.far.nbytes

    def _announcement(self) -> int:
        """What else the card says."""
        return 0

    def _cards(self) -> list[Card]:
        cards = self.exchange.sequencer.cards(self.call)
        for rank, card in enumerate(cards):
            if card.refused:
                raise self._exceeded(rank, card)
        return cards

    def _exceeded(self, rank: int, card: Card) -> MemoryLimitExceeded:
        """The error that all ranks raise when `rank` lacks memory."""
        return self.exchange.exceeded(self.call, rank, card.need, card.limit)

    def _send_home(self) -> None:
        exchange = self.exchange
        self.cards = self._cards()
        assert self.far is not None
        self.far.send(self.sources, exchange.memory.region, [card.offsets[-1] for card in self.cards])
        exchange.sequencer.signal_all(LANE_GRANTED, self.call)

    def _addresses(self, cards: list[Card]) -> list[list[int]]:
        """By plane and rank, where rows that can be read in place begin."""
        bases = self.exchange.bases
        return [
            [base + card.offsets[plane] for base, card in zip(bases, cards, strict=True)]
            for plane in range(len(self.planes))
        ]

    def _pull(self) -> None:
        assert self.routing.routes is not None
        addresses = self._addresses(self._cards())
        self._sum(self.routing.routes, addresses)

    def _own_addresses(self) -> list[list[int]]:
        """As `_addresses`, but my own rows where they are, for they need not have been shared."""
        addresses = self._addresses(self.cards)
        for where, plane in zip(addresses, self.planes, strict=True):
            where[self.exchange.rank] = plane.data_ptr()
        return addresses

    def _pull_far(self) -> None:
        exchange = self.exchange
        exchange.sequencer.check_notices(self.call)
        assert self.far is not None
        addresses = self._own_addresses()
        if self.landing is not None:
            self.far.readdress(addresses, self.landing.address)
        (routes,) = exchange.queue.make(self.far_rooms, self.far.make_routes)
        self._sum(routes, addresses)

    def _sum(self, routes: torch.Tensor, addresses: list[list[int]]) -> None:
        num_planes = len(self.row_format.plane_bytes)
        num_tokens = routes.shape[0]
        queue = self.exchange.queue
        out = queue.fill(
            self.out, self.row_format.reduce, num_tokens, routes, addresses[:num_planes], self.topk_weights
        )
        values = None
        if self.values is not None:
            (values,) = queue.make(self.home, self._pull_values, routes, self.values.dtype, addresses[num_planes])
        self._return(out, values)

    def _return(self, out: torch.Tensor, values: torch.Tensor | None) -> None:
        exchange = self.exchange
        # What was read while its owner gave up is worth nothing.
        exchange.sequencer.check_notices(self.call)
        self.call.result = Returned(out, values)
        exchange.sequencer.signal_all(LANE_DONE, self.call)

    def _pull_values(self, routes: torch.Tensor, dtype: torch.dtype, addresses: list[int]) -> Tensors:
        kernels, routing = self.exchange.kernels, self.routing
        if routing.layout == "flat":
            expert_rank = self.exchange.expert_rank
            return (kernels.pull_flat_values(routing.topk_idx, routes, expert_rank, addresses, dtype=dtype),)
        return (kernels.pull_values(routes, addresses, dtype=dtype),)

    def _release(self) -> None:
        self.exchange.sequencer.check_notices(self.call)
        self.call.blocks = ()

    _phases: tuple[Phase, ...] = (
        Phase("ready", None, _ready),
        Phase("pull", LANE_BEGUN, _pull),
        Phase("release", LANE_DONE, _release),
    )
    _far_phases: tuple[Phase, ...] = (
        Phase("ready", None, _ready_far),
        Phase("send home", LANE_BEGUN, _send_home),
        Phase("pull", LANE_GRANTED, _pull_far),
        Phase("release", LANE_DONE, _release),
    )
