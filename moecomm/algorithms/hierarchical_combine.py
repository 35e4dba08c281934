"""The phases of one combine between domains; see hierarchical.py for the order."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from moecomm import _C
from moecomm.algorithms.calls import LANE_BEGUN, LANE_DONE, LANE_GRANTED, Phase
from moecomm.algorithms.channels import HEADER_BYTES, Channels, Chunk, ChunkForm
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.home_sums import HomeSums
from moecomm.algorithms.hops import Choice
from moecomm.algorithms.mailbox import Card
from moecomm.algorithms.plan import block_layout
from moecomm.algorithms.rail_requests import requests_for, requests_per_domain
from moecomm.algorithms.rails import Entries, RailRoutes, Rails, copy_rows, tensor_at
from moecomm.algorithms.rendezvous_combine import Combine
from moecomm.algorithms.routing import Routing
from moecomm.algorithms.traffic import Traffic
from moecomm.codecs.base import RowFormat
from moecomm.errors import MemoryLimitExceeded
from moecomm.kernels.registry import chosen_eager_kernels

__all__ = ["HierarchicalCombine"]

# Sent to each rail before it is known whether the call goes over rails; a call that begins never waits.
_EARLY_CHUNKS = 4
# In place of the first offset on a card: what is missing is memory for blocks of fixed shape.
_LACKS_FIXED = -1


class HierarchicalCombine(Combine):
    """One combine of one rank: asks the rails for rows of their domains, or sums of them, and serves those who ask it.

    Arguments:
        exchange, y, routing, row_format, topk_weights, values: as for `Combine`.
        per_host: each domain's rows are summed there.
        channels: to and from the rails.
        rails: who is where.
    """

    def __init__(
        self,
        exchange: Exchange,
        y: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        *,
        topk_weights: torch.Tensor | None,
        values: torch.Tensor | None,
        per_host: bool,
        channels: Channels,
        rails: Rails,
    ) -> None:
        super().__init__(exchange, y, routing, row_format, topk_weights=topk_weights, values=values, per_host=per_host)
        self.channels = channels
        self.rails = rails
        self.per_host = per_host
        self.num_rows = math.prod(y.shape[:-1])
        self.asking: list[_RequestsOut] = []
        self.traffic: Traffic | None = None
        self.sums: HomeSums | None = None
        self.is_open = False
        self.is_hierarchical = False
        self.num_topk = routing.topk_idx.shape[1]
        # Rows are as wide as y's whatever the codec: the rails have decoded them.
        self.row_bytes = row_format.hidden * row_format.dtype.itemsize
        # Where nothing is summed, one entry brings all values of a token.
        sums = per_host or not self.row_bytes
        self.requests = requests_per_domain(rails, routing) if sums else requests_for(rails, routing)
        value_bytes = 0 if values is None else values.element_size()
        self.answer_bytes = (self.row_bytes, value_bytes * self.num_topk)
        weight_bytes = 0 if topk_weights is None else topk_weights.element_size()
        self.arrays = (rails.id_dtype.itemsize * self.num_topk, weight_bytes * self.num_topk)
        most_rows = max(1, channels.chunk_bytes // max(1, sum(self.answer_bytes)))
        self.form = ChunkForm(channels.chunk_bytes, self.arrays, most_rows)
        self.answers = block_layout(self.requests.num_rows, self.answer_bytes)

    def _share(self) -> tuple[tuple[int, ...], list[_C.Block], int]:
        """As there, but of rows of fixed shape, which are mostly empty, only those that routes name are copied."""
        routing, memory = self.routing, self.exchange.memory
        if routing.mode != "low_latency":
            return super()._share()
        assert routing.counts is not None
        kernels, experts = chosen_eager_kernels("cpu"), self.exchange.placement.expert_range(self.exchange.rank)
        capacity = routing.capacity if routing.layout == "slab" else 0
        offsets: list[int] = []
        blocks: list[_C.Block] = []
        for plane in self.planes:
            offset = memory.offset_of(plane) if plane.nbytes else 0
            if offset is None:
                block = memory.allocate_leaving(plane.nbytes)
                if block is None:
                    return (_LACKS_FIXED,), [], plane.nbytes
                row_bytes = plane.nbytes // self.num_rows
                where = (block.address, plane, row_bytes, routing.counts, experts)
                kernels.copy_expert_rows(*where, capacity, routing.expert_alignment)
                memory.num_copies += 1
                blocks.append(block)
                offset = block.offset
            offsets.append(offset)
        return tuple(offsets), blocks, 0

    def _exceeded(self, rank: int, card: Card) -> MemoryLimitExceeded:
        if card.offsets[0] != _LACKS_FIXED:
            return super()._exceeded(rank, card)
        self.call.is_agreed_failure = True
        memory, who = self.exchange.memory, self.exchange.transport.describe_peer(rank)
        return memory.exceeded_fixed(self.call.title, who, card.need, memory.fixed_limit)

    def _landing_bytes(self) -> int:
        return max(self.answers.nbytes, 0 if self.far is None else self.far.nbytes)

    def _announcement(self) -> int:
        return self.requests.num_rows

    def _costs(self, counts: npt.NDArray[np.int32], num_rows: int) -> tuple[int, int]:
        """Bytes between domains of either way, from all ranks' counts and answers or from one's own."""
        width = sum(self.row_format.plane_bytes) + self.answer_bytes[1] // (1 if self._is_flat else self.num_topk)
        direct = self.rails.direct_rows(counts, self.routing.layout) * width
        return direct, num_rows * (sum(self.answer_bytes) + sum(self.arrays))

    def _is_worth_it(self) -> bool:
        """Whether fewer bytes cross between domains this way; the same on all ranks, who know all counts."""
        assert self.routing.counts is not None
        costs = self._costs(self.routing.counts.numpy(), sum(card.offsets[-2] for card in self.cards))
        read_by_rails = costs[0]  # the rows that would cross from rank to rank
        if self.per_host:
            self.exchange.hops.note("combine", Choice(self.call.title, True, *costs, read_by_rails))
            return True
        return self.exchange.hops.choose("combine", self.call.title, *costs, read_by_rails)

    @property
    def _is_flat(self) -> bool:
        return self.routing.layout == "flat"

    def _ready(self) -> None:
        super()._ready_far()
        if self.landing is None or not self.exchange.sequencer.is_oldest(self.call):
            return  # see HierarchicalDispatch._send_early
        assert self.routing.counts is not None
        costs = self._costs(self.routing.counts[self.exchange.rank].numpy(), self.requests.num_rows)
        if self.per_host or self.exchange.hops.prefers_rails(*costs):
            # Before the peers are ready. If the call goes another way after all, nobody takes these chunks.
            self._traffic_out().send(_EARLY_CHUNKS)

    def _stream(self) -> bool:
        exchange = self.exchange
        if not self.is_open:
            self.is_open = True
            self.cards = self._cards()
            self.is_hierarchical = self._is_worth_it()
            if not self.is_hierarchical:
                if self.far is not None:
                    landings = [card.offsets[-1] for card in self.cards]
                    self.far.send(self.sources, exchange.memory.region, landings)
                exchange.sequencer.signal_all(LANE_GRANTED, self.call)
            else:
                self.addresses = self._own_addresses()
                self._traffic_out().expect(self._incoming())
        if not self.is_hierarchical:
            ranks = range(exchange.placement.num_ranks)
            self.call.awaiting = exchange.sequencer.behind(LANE_GRANTED, self.call, ranks)
            return not self.call.awaiting
        # Once my rails have handled what I asked, all answers are here, however far others are.
        assert self.traffic is not None
        is_finished = self.traffic.advance()
        self.call.awaiting = self.traffic.awaited()
        if not is_finished:
            self._home_sums().advance([one.num_answered for one in self.asking])  # rather than wait for the link
        return is_finished

    def _traffic_out(self) -> Traffic:
        """What I ask for; made once."""
        if self.traffic is None:
            me = weakref.proxy(self)  # what is left of the traffic of a failed call must not keep its memory
            row = 0
            for entries, is_whole in zip(self.requests.entries, self.requests.is_whole, strict=True):
                weights = None
                if self.topk_weights is not None:
                    weights = torch.where(is_whole[:, None], self.topk_weights[entries.tokens], 1.0).contiguous()
                self.asking.append(_RequestsOut(me, self.channels.rails[entries.domain], entries, weights, row))
                row += len(entries.tokens)
            self.traffic = Traffic(self.channels, self.call.sequence, self.asking, is_answered=True)
        return self.traffic

    def _incoming(self) -> dict[int, Callable[[Chunk], None]]:
        rails, routing = self.rails, self.routing
        assert routing.counts is not None
        counts, me, serve = routing.counts.numpy(), weakref.proxy(self), type(self)._serve
        return {
            source: partial(serve, me, RailRoutes(self.exchange.kernels, rails.placement, routing, source), source)
            for source in self.channels.sources
            if rails.concerns(counts, source, rails.domain)
        }

    def _serve(self, there: RailRoutes, source: int, chunk: Chunk) -> None:
        """Answers a chunk of requests: sums of rows of my domain, and values."""
        exchange, num_planes = self.exchange, len(self.row_format.plane_bytes)
        at_ids, at_weights = self.form.addresses(chunk.address, chunk.num_rows)
        shape = (chunk.num_rows, self.num_topk)
        ids = tensor_at(at_ids, self.rails.id_dtype, shape).to(torch.int32)
        weights = None if self.topk_weights is None else tensor_at(at_weights, self.topk_weights.dtype, shape)
        routes = there.next_routes(ids)
        answers: list[torch.Tensor] = []
        if self.row_bytes:
            answers.append(self.row_format.reduce(chunk.num_rows, routes, self.addresses[:num_planes], weights))
        else:
            answers.append(torch.empty(0))
        if self.values is not None:
            answers.append(self._values_at(ids, routes, self.values.dtype, self.addresses[num_planes]))
        for answer, target in zip(answers, chunk.answers, strict=False):
            nbytes = answer.numel() * answer.element_size()
            if nbytes:
                exchange.transport.put(exchange.memory.region, target, answer.data_ptr(), nbytes, source)
                exchange.hops.between += nbytes

    def _values_at(
        self, topk_idx: torch.Tensor, routes: torch.Tensor, dtype: torch.dtype, addresses: list[int]
    ) -> torch.Tensor:
        kernels = self.exchange.kernels
        if self._is_flat:
            return kernels.pull_flat_values(
                topk_idx, routes, self.exchange.placement.expert_rank, addresses, dtype=dtype
            )
        return kernels.pull_values(routes, addresses, dtype=dtype)

    def _pull_any(self) -> None:
        if not self.is_hierarchical:
            if self.far is not None:
                self._pull_far()
                return
            assert self.routing.routes is not None
            self._sum(self.routing.routes, self._addresses(self.cards))
            return
        self.exchange.sequencer.check_notices(self.call)
        self._return(self._home_sums().finish(), self._values_home(self._landing_addresses()[1]))

    def _landing_addresses(self) -> tuple[int, int]:
        """Where the first row and the first values land."""
        landing = 0 if self.landing is None else self.landing.address
        rows, values = self.answers.offsets
        return landing + rows, landing + values

    def _home_sums(self) -> HomeSums:
        """Of my own tokens; made once."""
        if self.sums is None:
            near, near_routes = self.requests.near, None
            if near is not None:
                assert self.routing.routes is not None
                near_routes = self.rails.near(self.routing.routes[near.tokens])
            addresses = self.addresses[: len(self.row_format.plane_bytes)]
            at_rows = self._landing_addresses()[0]
            self.sums = HomeSums(self.requests, near_routes, self.row_format, addresses, at_rows, self.topk_weights)
        return self.sums

    def _values_home(self, at_values: int) -> torch.Tensor | None:
        if self.values is None:
            return None
        dtype, requests, routes = self.values.dtype, self.requests, self.routing.routes
        assert routes is not None
        near = self.addresses[len(self.row_format.plane_bytes)]
        values = self._values_at(self.routing.topk_idx, self.rails.near(routes), dtype, near)
        landed = tensor_at(at_values, dtype, (requests.num_rows, self.num_topk))
        row = 0
        for entries in requests.entries:
            places, columns = (entries.ids >= 0).nonzero(as_tuple=True)
            values[entries.tokens[places], columns] = landed[row + places, columns]
            row += len(entries.tokens)
        return values

    _phases = _far_phases = (
        Phase("ready", None, _ready),
        Phase("send home", LANE_BEGUN, _stream, is_stream=True),
        Phase("pull", None, _pull_any),
        Phase("release", LANE_DONE, Combine._release),
    )


class _RequestsOut:
    """Requests on their way to a rail.

    Arguments:
        combine: whose they are.
        rail: to whom they go.
        entries: what is asked for.
        weights: `[n, K]` of the entries' rows, contiguous, or None.
        first_row: where the first answer belongs among all.
    """

    def __init__(
        self, combine: HierarchicalCombine, rail: int, entries: Entries, weights: torch.Tensor | None, first_row: int
    ) -> None:
        self.rail = rail
        self._combine = combine
        self._entries = entries
        self._weights = weights
        self._first_row = first_row
        self._next = 0

    @property
    def num_answered(self) -> int:
        """Entries, the first ones, that the rail has answered."""
        most_rows = self._combine.form.most_rows
        num_chunks = -(-self._next // most_rows) - self._combine.channels.num_unanswered(self.rail)
        return min(max(num_chunks, 0) * most_rows, self._next)

    def write_next(self, outbox: int) -> tuple[Chunk, int]:
        combine, entries, form = self._combine, self._entries, self._combine.form
        begin = self._next
        end = self._next = min(begin + form.most_rows, len(entries.tokens))
        num_rows = end - begin
        at_ids, at_weights = form.addresses(outbox, num_rows)
        copy_rows(entries.ids, begin, end, at_ids)
        if self._weights is not None:
            copy_rows(self._weights, begin, end, at_weights)
        assert combine.landing is not None
        row = self._first_row + begin
        rows_at, values_at = (
            combine.landing.offset + offset + row * nbytes
            for offset, nbytes in zip(combine.answers.offsets, combine.answer_bytes, strict=True)
        )
        nbytes = form.nbytes(num_rows)
        combine.exchange.hops.between += HEADER_BYTES + nbytes
        return Chunk(0, num_rows, end == len(entries.tokens), (rows_at, values_at)), nbytes
