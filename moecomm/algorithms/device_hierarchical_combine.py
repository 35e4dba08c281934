"""The phases of one combine of devices over rails; see device_hierarchical.py for the order."""

from __future__ import annotations

import abc
from typing import ClassVar

import torch

from moecomm.algorithms.calls import LANE_ANSWERED, LANE_BEGUN, LANE_DONE, LANE_GRANTED, Phase, device_count
from moecomm.algorithms.device_rails import DeviceRails
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.passage import Part, pieces_of, to_homes, to_rails
from moecomm.algorithms.rendezvous_combine import Combine
from moecomm.algorithms.routing import Routing
from moecomm.codecs.base import RowFormat
from moecomm.devices.base import AsynchronousDevice
from moecomm.devices.queue import Tensors

__all__ = ["DeviceHierarchicalCombine", "DevicePerHostCombine"]


class DeviceHierarchicalCombine(Combine, abc.ABC):
    """One combine of one rank: asks a rail in each domain for rows of its tokens there, or sums, and answers others.

    Requests are ids and weights, one for each token; answers are rows, and the values of each request. Each home is
    answered by itself, in pieces: one is made while those before it are under way.

    Arguments:
        exchange, y, routing, row_format, topk_weights, values: as for `Combine`.
        rails: who is where.

    Attributes:
        is_exact: sums are made in the order of `reduce="exact"`; rows of my own domain are read where they lie. Else in
            that of "per_host"; there a rank is its own rail.
        asked_with: bytes of what goes with the ids of a request.
    """

    is_exact: ClassVar[bool]
    asked_with: ClassVar[tuple[int, ...]] = ()

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
        what = {"topk_weights": topk_weights, "values": values}
        super().__init__(exchange, y, routing, row_format, **what, per_host=not self.is_exact)
        self.far = None  # nothing comes from rank to rank
        self.rails = rails
        assert isinstance(exchange.device, AsynchronousDevice)
        self.device: AsynchronousDevice = exchange.device
        self.num_topk = routing.topk_idx.shape[1]
        self.num_planes = len(row_format.plane_bytes)
        request_bytes, answer_bytes = self.widths(routing, row_format, **what)
        crossings = rails.crossings_of(routing)
        assert crossings is not None
        num_asked, num_answered = crossings[:, 0], crossings[:, int(self.is_exact)]
        where, with_own = (rails.topology, exchange.rank, exchange.reach.far), not self.is_exact
        self.requests = to_rails(*where, num_asked, request_bytes, with_own=with_own)
        self.answers = to_homes(*where, num_answered, answer_bytes, with_own=with_own)
        self.call.followed = rails.followed((LANE_BEGUN,), self.requests, self.answers)
        self.unanswered: dict[int, Part] | None = None  # by home
        # By home, how answers are made of rows here.
        self.made_of: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        # One block: answers to me, requests to me, and what leaves of either.
        self.at_requests = self.answers.arriving_bytes
        self.at_asked = self.at_requests + self.requests.arriving_bytes
        self.at_answered = self.at_asked + self.requests.leaving_bytes

    @classmethod
    def widths(
        cls, routing: Routing, row_format: RowFormat, *, topk_weights: torch.Tensor | None, values: torch.Tensor | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes of each array of a request, and of an answer."""
        num_topk = routing.topk_idx.shape[1]
        weight_bytes = () if topk_weights is None else (topk_weights.element_size() * num_topk,)
        value_bytes = () if values is None else (values.element_size() * num_topk,)
        # Answers are as wide as y's rows whatever the codec: the rails have decoded them.
        answer_bytes = (row_format.hidden * row_format.dtype.itemsize, *value_bytes)
        return (*cls.asked_with, 4 * num_topk, *weight_bytes), answer_bytes

    @classmethod
    def costs(
        cls,
        rails: DeviceRails,
        routing: Routing,
        row_format: RowFormat,
        *,
        topk_weights: torch.Tensor | None,
        values: torch.Tensor | None,
    ) -> tuple[int, int]:
        """Bytes between domains from rank to rank, and over rails; the same on all ranks, who know all counts."""
        assert routing.counts is not None
        num_values = routing.topk_idx.shape[1] if routing.layout == "flat" else 1
        width = row_format.row_bytes + (0 if values is None else values.element_size() * num_values)
        direct = rails.rails.direct_rows(routing.counts.numpy(), routing.layout) * width
        crossings = rails.crossings_of(routing)
        assert crossings is not None
        numbers = [rails.crossing_rows(crossings[:, column]) for column in (0, int(cls.is_exact))]
        request, answer = cls.widths(routing, row_format, topk_weights=topk_weights, values=values)
        return direct, numbers[0] * sum(request) + numbers[1] * sum(answer)

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
        offsets, blocks = self._blocks(-2)
        leaving = self._start + self.at_asked
        arrays = {part.receiver: requests.sent_arrays(part, leaving, blocks) for part in requests.leaving}
        exchange.queue.run(self._pack, self.rails.by_domain(arrays))
        exchange.put(leaving, requests.runs(offsets))
        self.rails.queue.signal_all(LANE_GRANTED, device_count(LANE_GRANTED, self.call.sequence))
        exchange.sequencer.signal_all(LANE_GRANTED, self.call)

    def _pack(self, addresses: list[list[int]]) -> None:
        with_ids, with_own = self._asked_with(), not self.is_exact
        self.rails.pack(with_ids, self.routing.topk_idx, self.topk_weights, addresses, with_own=with_own)

    def _asked_with(self) -> Tensors:
        """What goes with the ids, of all tokens; by the device's work, like all below that has no host in it."""
        return ()

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
        offsets, blocks = self._blocks(-1)
        leaving = self._start + self.at_answered
        targets = answers.sent_arrays(part, leaving, blocks)
        if home == exchange.rank:
            queue.run(self._answer, part, range(part.num_rows), request, targets)
            return
        queue.wait_beside(home, LANE_GRANTED, device_count(LANE_GRANTED, self.call.sequence))
        num_pieces = pieces_of(answers.leaving_bytes)
        for piece in range(num_pieces):
            for _, share in answers.shares([part], piece, num_pieces):
                queue.run_beside(home, self._answer, part, share, request, targets)
                # Values go with the first rows of a part.
                its_runs = [run for run in answers.piece(piece, num_pieces, offsets, 1) if run.rank == home]
                exchange.put_beside(home, leaving, its_runs, told if share.stop == part.num_rows else None)
        self.rails.tell(self.call, LANE_ANSWERED, home)

    def _answer(self, part: Part, share: range, request: Part, targets: list[int]) -> None:
        """Makes answers to one rank, a range of them."""
        if share.start == 0:  # all ids have come by now
            self._take(part, request, targets)
        rows = slice(share.start, share.stop)
        routes, weights = self.made_of[part.receiver]
        weights = None if weights is None else weights[rows]
        out = self.device.view(targets[0], None, self.row_format.dtype, (part.num_rows, self.row_format.hidden))
        self.row_format.reduce(len(share), routes[rows], self.addresses[: self.num_planes], weights, out[rows])

    def _take(self, part: Part, request: Part, targets: list[int]) -> None:
        """Looks at what one rank asks for, and answers with the values."""
        shape = (request.num_rows, self.num_topk)
        asked = self.requests.received_arrays(request, self._start + self.at_requests)
        at_ids, *at_weights = asked[len(self.asked_with) :]
        ids = self.device.view(at_ids, None, torch.int32, shape)
        weights = None
        if self.topk_weights is not None:
            weights = self.device.view(at_weights[0], None, self.topk_weights.dtype, shape)
        routes = self.rails.routes_of(self.routing, part.receiver, ids)
        self.made_of[part.receiver] = self._made_of(routes, weights, asked, part.num_rows)
        if self.values is not None:
            answered = self.device.view(targets[1], None, self.values.dtype, (part.num_rows, self.num_topk))
            answered[: request.num_rows].copy_(self._values_of(ids, routes, self.addresses[self.num_planes]))

    @abc.abstractmethod
    def _made_of(
        self, routes: torch.Tensor, weights: torch.Tensor | None, asked: list[int], num_answers: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """How answers to one rank are made of rows here: routes and weights, a row for each.

        Arguments:
            routes: `[n, P]` int64, into my domain, of the n tokens that are asked for.
            weights: `[n, K]`, or None.
            asked: where the arrays of the request lie.
            num_answers: how many there are.
        """

    def _values_of(self, ids: torch.Tensor, routes: torch.Tensor, addresses: list[int]) -> torch.Tensor:
        assert self.values is not None
        kernels, dtype = self.exchange.kernels, self.values.dtype
        if self.routing.layout == "flat":
            return kernels.pull_flat_values(ids, routes, self.exchange.expert_rank, addresses, dtype=dtype)
        return kernels.pull_values(routes, addresses, dtype=dtype)

    def _pull_answers(self) -> bool:
        """Adds up what has come, once my rails have put it."""
        exchange, call = self.exchange, self.call
        senders = [part.sender for part in self.answers.arriving if part.num_rows and part.sender != exchange.rank]
        rails = self.rails.come(call, LANE_ANSWERED, senders)
        if call.awaiting:
            return False
        if rails:
            self.rails.queue.wait_for(rails, LANE_ANSWERED, device_count(LANE_ANSWERED, call.sequence))
        arrays = {part.sender: self.answers.received_arrays(part, self._start) for part in self.answers.arriving}
        at_rows, *at_values = self.rails.by_domain(arrays)
        out = exchange.queue.fill(self.out, self._add_up, at_rows)
        values = None
        if self.values is not None:
            (values,) = exchange.queue.make(self.home, self._values_home, at_values[0])
        self._return(out, values)
        return True

    @abc.abstractmethod
    def _add_up(self, addresses: list[int], out: torch.Tensor) -> torch.Tensor:
        """The sums `[T, H]` of my tokens, left in `out`; `addresses`, by domain, are those of its answers."""

    def _values_home(self, addresses: list[int]) -> Tensors:
        """`[T, K]` values; `addresses`, by domain, are those of what has come from there."""
        assert self.values is not None
        topk_idx, rails, with_own = self.routing.topk_idx, self.rails, not self.is_exact
        routes, dtype = rails.domain_routes(topk_idx, with_own=with_own), self.values.dtype
        # To who reads flat values a domain is a rank, see DeviceRails.
        kernels = self.exchange.kernels
        return (kernels.pull_flat_values(topk_idx, routes, rails.domains(with_own), addresses, dtype=dtype),)

    _phases = _far_phases = (
        Phase("ready", None, Combine._ready_far),
        Phase("ask", LANE_BEGUN, _ask),
        Phase("answer", None, _serve, is_stream=True),
        Phase("pull", None, _pull_answers, is_stream=True),
        Phase("release", LANE_DONE, Combine._release),
    )


class DevicePerHostCombine(DeviceHierarchicalCombine):
    """One with a sum per domain: an answer is the sum of a token's rows there, and sums are added in their order."""

    is_exact = False

    def _made_of(
        self, routes: torch.Tensor, weights: torch.Tensor | None, asked: list[int], num_answers: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return routes, weights

    def _add_up(self, addresses: list[int], out: torch.Tensor) -> torch.Tensor:
        routes = self.rails.domain_routes(self.routing.topk_idx, with_own=True)
        return self.row_format.reduce(len(out), routes, [addresses], None, out)
