"""The phases of one combine of devices with a sum per domain; see device_hierarchical.py for the order."""

from __future__ import annotations

import torch

from moecomm.algorithms.calls import LANE_ANSWERED, LANE_BEGUN, LANE_DONE, LANE_GRANTED, Phase, device_count
from moecomm.algorithms.device_rails import DeviceRails
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.hops import Choice
from moecomm.algorithms.passage import Part, pieces_of, to_homes, to_rails
from moecomm.algorithms.rendezvous_combine import Combine
from moecomm.algorithms.routing import Routing
from moecomm.codecs.base import RowFormat
from moecomm.devices.base import AsynchronousDevice
from moecomm.devices.queue import Tensors

__all__ = ["DeviceHierarchicalCombine"]


class DeviceHierarchicalCombine(Combine):
    """One combine of one rank: asks a rail in each domain for sums of its tokens' rows there, and answers others.

    In its own domain a rank is its own rail. Requests are ids and weights; answers a row for each token, and values.
    Sums of one piece are made while those before it are under way, and those that stay in my domain at last.

    Arguments:
        exchange, y, routing, row_format, topk_weights, values: as for `Combine`.
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
        rails: DeviceRails,
    ) -> None:
        super().__init__(exchange, y, routing, row_format, topk_weights=topk_weights, values=values, per_host=True)
        self.far = None  # nothing comes from rank to rank
        self.rails = rails
        assert isinstance(exchange.device, AsynchronousDevice)
        self.device: AsynchronousDevice = exchange.device
        crossings = rails.crossings_of(routing)
        assert crossings is not None
        self.num_topk = routing.topk_idx.shape[1]
        # Sums are as wide as y's rows whatever the codec: the rails have decoded them.
        row_bytes = row_format.hidden * row_format.dtype.itemsize
        self.answer_bytes = (row_bytes, *(() if values is None else (values.element_size() * self.num_topk,)))
        weight_bytes = () if topk_weights is None else (topk_weights.element_size() * self.num_topk,)
        self.request_bytes = (4 * self.num_topk, *weight_bytes)
        where = (rails.topology, exchange.rank, exchange.reach.far, crossings)
        self.requests = to_rails(*where, self.request_bytes, with_own=True)
        self.answers = to_homes(*where, self.answer_bytes)
        self.call.followed = rails.followed((LANE_BEGUN,), self.requests, self.answers)
        self.num_crossing = rails.crossing_rows(crossings)
        self.unanswered: dict[int, Part] | None = None  # by home
        self.rail_routes: dict[int, torch.Tensor] = {}  # by home
        # One block: answers to me, requests to me, and what leaves of either.
        self.at_requests = self.answers.arriving_bytes
        self.at_asked = self.at_requests + self.requests.arriving_bytes
        self.at_answered = self.at_asked + self.requests.leaving_bytes

    def _landing_bytes(self) -> int:
        return self.at_answered + self.answers.leaving_bytes

    def _announcement(self) -> int:
        return 0 if self.landing is None else self.landing.offset + self.at_requests

    def _blocks(self, place: int) -> tuple[list[int], list[int]]:
        """By rank, what all cards say at a place: offsets in receive memory, and addresses here."""
        offsets = [card.offsets[place] for card in self.cards]
        return offsets, [base + offset for base, offset in zip(self.exchange.bases, offsets, strict=True)]

    @property
    def _start(self) -> int:
        return 0 if self.landing is None else self.landing.address

    def _ask(self) -> None:
        """Packs ids and weights of my tokens, and puts them to the rails."""
        exchange, requests = self.exchange, self.requests
        self.cards = self._cards()
        self._note()
        offsets, blocks = self._blocks(-2)
        leaving = self._start + self.at_asked
        arrays = {part.receiver: requests.sent_arrays(part, leaving, blocks) for part in requests.leaving}
        exchange.queue.run(self._pack, self.rails.by_domain(arrays))
        exchange.put(leaving, requests.runs(offsets))
        self.rails.queue.signal_all(LANE_GRANTED, device_count(LANE_GRANTED, self.call.sequence))
        exchange.sequencer.signal_all(LANE_GRANTED, self.call)

    def _pack(self, addresses: list[list[int]]) -> None:
        self.rails.pack((), self.routing.topk_idx, self.topk_weights, addresses, with_own=True)

    def _note(self) -> None:
        assert self.routing.counts is not None
        num_values = 1 if self.routing.layout != "flat" else self.num_topk
        value_bytes = 0 if self.values is None else self.values.element_size() * num_values
        width = sum(self.row_format.plane_bytes) + value_bytes
        direct = self.rails.rails.direct_rows(self.routing.counts.numpy(), self.routing.layout) * width
        over_rails = self.num_crossing * (sum(self.answer_bytes) + sum(self.request_bytes))
        # Rails read the rows that would cross from rank to rank.
        self.exchange.hops.note("combine", Choice(self.call.title, True, direct, over_rails, direct))

    def _serve(self) -> bool:
        """Answers those whose rail I am and whose hosts have given their devices the requests."""
        if self.unanswered is None:
            self.addresses = self._own_addresses()
            self.unanswered = {part.receiver: part for part in self.answers.leaving if part.num_rows}
        for home in self.rails.come(self.call, LANE_GRANTED, self.unanswered):
            self._serve_home(self.unanswered.pop(home))
        return not self.unanswered

    def _serve_home(self, part: Part) -> None:
        """Answers one home, piece by piece, and tells it, whatever others have yet to ask."""
        exchange, queue, answers, home = self.exchange, self.rails.queue, self.answers, part.receiver
        told = (LANE_ANSWERED, device_count(LANE_ANSWERED, self.call.sequence))
        request = next(one for one in self.requests.arriving if one.sender == home)
        asked = self.requests.received_arrays(request, self._start + self.at_requests)
        offsets, blocks = self._blocks(-1)
        leaving = self._start + self.at_answered
        targets = answers.sent_arrays(part, leaving, blocks)
        if home == exchange.rank:
            queue.run(self._answer, part, range(part.num_rows), asked, targets)
            return
        queue.wait_beside(home, LANE_GRANTED, device_count(LANE_GRANTED, self.call.sequence))
        num_pieces = pieces_of(answers.leaving_bytes)
        for piece in range(num_pieces):
            for _, share in answers.shares([part], piece, num_pieces):
                queue.run_beside(home, self._answer, part, share, asked, targets)
                runs = answers.piece(piece, num_pieces, offsets, len(self.answer_bytes))
                its_runs = [run for run in runs if run.rank == home]
                exchange.put_beside(home, leaving, its_runs, told if share.stop == part.num_rows else None)
        self.rails.tell(self.call, LANE_ANSWERED, home)

    def _answer(self, part: Part, share: range, asked: list[int], targets: list[int]) -> None:
        """Sums the rows of some tokens of one rank in my domain."""
        shape, num_planes = (part.num_rows, self.num_topk), len(self.row_format.plane_bytes)
        rows = slice(share.start, share.stop)
        all_ids = self.device.view(asked[0], None, torch.int32, shape)
        if share.start == 0:
            self.rail_routes[part.receiver] = self.rails.routes_of(self.routing, part.receiver, all_ids)
        ids, routes = all_ids[rows], self.rail_routes[part.receiver][rows]
        weights = None
        if self.topk_weights is not None:
            weights = self.device.view(asked[1], None, self.topk_weights.dtype, shape)[rows]
        out = self.device.view(targets[0], None, self.row_format.dtype, (part.num_rows, self.row_format.hidden))
        self.row_format.reduce(len(share), routes, self.addresses[:num_planes], weights, out[rows])
        if self.values is not None:
            answered = self.device.view(targets[1], None, self.values.dtype, shape)[rows]
            answered.copy_(self._values_of(ids, routes, self.addresses[num_planes]))

    def _values_of(self, ids: torch.Tensor, routes: torch.Tensor, addresses: list[int]) -> torch.Tensor:
        assert self.values is not None
        kernels, dtype = self.exchange.kernels, self.values.dtype
        if self.routing.layout == "flat":
            return kernels.pull_flat_values(ids, routes, self.exchange.expert_rank, addresses, dtype=dtype)
        return kernels.pull_values(routes, addresses, dtype=dtype)

    def _pull_answers(self) -> bool:
        """Adds up the domains' sums, once my rails have put them."""
        exchange, call = self.exchange, self.call
        senders = [part.sender for part in self.answers.arriving if part.num_rows and part.sender != exchange.rank]
        rails = self.rails.come(call, LANE_ANSWERED, senders)
        if call.awaiting:
            return False
        if rails:
            self.rails.queue.wait_for(rails, LANE_ANSWERED, device_count(LANE_ANSWERED, call.sequence))
        arrays = {part.sender: self.answers.received_arrays(part, self._start) for part in self.answers.arriving}
        at_sums, *at_values = self.rails.by_domain(arrays)
        out = exchange.queue.fill(self.out, self._sum_domains, at_sums)
        values = None
        if self.values is not None:
            (values,) = exchange.queue.make(self.home, self._values_home, at_values[0])
        self._return(out, values)
        return True

    def _sum_domains(self, addresses: list[int], out: torch.Tensor) -> torch.Tensor:
        routes = self.rails.domain_routes(self.routing.topk_idx, with_own=True)
        return self.row_format.reduce(len(out), routes, [addresses], None, out)

    def _values_home(self, addresses: list[int]) -> Tensors:
        assert self.values is not None
        topk_idx, rails = self.routing.topk_idx, self.rails
        routes, dtype = rails.domain_routes(topk_idx, with_own=True), self.values.dtype
        # To who reads flat values a domain is a rank, see DeviceRails.
        kernels = self.exchange.kernels
        return (kernels.pull_flat_values(topk_idx, routes, rails.expert_domain, addresses, dtype=dtype),)

    _phases = _far_phases = (
        Phase("ready", None, Combine._ready_far),
        Phase("ask", LANE_BEGUN, _ask),
        Phase("answer", None, _serve, is_stream=True),
        Phase("pull", None, _pull_answers, is_stream=True),
        Phase("release", LANE_DONE, Combine._release),
    )
