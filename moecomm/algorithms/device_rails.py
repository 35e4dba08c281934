"""Who is in which domain, as kernels look it up: rails for tensors on devices.

T tokens   K num_topk   P slots of routes   E experts   R ranks   D domains
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from moecomm.algorithms.calls import LANE_DONE, Call
from moecomm.algorithms.device_answers import DeviceAnswers
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.passage import Passage
from moecomm.algorithms.plan import Layout, plan_exchange
from moecomm.algorithms.rails import Rails
from moecomm.algorithms.routing import Routing
from moecomm.devices.base import AsynchronousDevice
from moecomm.devices.queue import OrderedQueue, Tensors
from moecomm.kernels.base import ROW_BITS
from moecomm.topology import Topology

__all__ = ["DeviceRails"]


class DeviceRails:
    """The tables of one rank.

    A domain is to the first hop what a rank is to layout `flat`: a token has one row in each, with the experts that it
    chose there. So the kernels of that layout do it, given the domains of experts in place of their ranks.

    Arguments:
        exchange: what calls share; its topology is known.

    Attributes:
        rails: who is where, on the host.
        topology: as there.
        queue: of the exchange.
        expert_domain: `[E]` int32 on the device.
        other_domain: the same, but -1 for experts of my own.
        answers: which rows answer an exact combine.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.topology: Topology = exchange.topology
        self.rails = rails = Rails(self.topology, exchange.placement, exchange.rank)
        assert isinstance(exchange.queue, OrderedQueue)
        self.queue: OrderedQueue = exchange.queue
        self._told: dict[tuple[int, int], int] = {}  # by rank and lane, what that rank alone was told
        where = exchange.device.torch_device
        domains = rails.domain_of_expert.to(torch.int32)
        self.expert_domain = domains.to(where)
        # Experts of my own domain are nowhere: their rows do not cross.
        self.other_domain = torch.where(domains == rails.domain, -1, domains).to(where)
        # Experts travel under the numbers that they have everywhere.
        self._expert_ids = torch.arange(domains.numel(), dtype=torch.int32, device=where)
        self._no_bases = torch.zeros(domains.numel() + len(rails.domain_of_rank), dtype=torch.int64, device=where)
        self.answers = DeviceAnswers(exchange, rails)
        # Index -1, of no route, is the last one.
        self._is_near = torch.cat((rails.domain_of_rank == rails.domain, torch.tensor([False]))).to(where)

    def count(self, topk_idx: torch.Tensor, layout: Layout) -> int:
        """Leaves my counts where the card takes them from; gives the fingerprint of the ids. The host waits once.

        Raises:
            ValueError, PeerTimeout, PeerLost: as `Queue.count_routes`.
        """
        exchange, mailbox = self._exchange, self._exchange.mailbox
        return self.queue.count_crossings(
            *(topk_idx, exchange.expert_rank, exchange.placement.num_ranks, mailbox.counts_out),
            *(functools.partial(self._tally, layout), mailbox.crossings_out[: 2 * self.topology.num_domains]),
        )

    def _tally(self, layout: Layout, topk_idx: torch.Tensor, totals: torch.Tensor) -> None:
        """By domain, tokens that have an expert there; then rows that answer an exact combine."""
        exchange, num_domains = self._exchange, self.topology.num_domains
        assert isinstance(exchange.device, AsynchronousDevice)
        kernels, is_flat = exchange.device.row_kernels(), layout == "flat"
        kernels.count_tokens(topk_idx, self.expert_domain, num_domains, totals[:num_domains])
        plan = kernels.plan_flat if is_flat else kernels.plan_expert_major
        no_bases = self._no_bases[: exchange.placement.num_ranks if is_flat else exchange.placement.num_experts]
        self.answers.count(plan(topk_idx, exchange.expert_rank, no_bases), totals[num_domains:])

    def followed(self, lanes: Iterable[int], *passages: Passage) -> dict[int, Sequence[int]]:
        """What `Call.followed` is in a call over rails.

        Arguments:
            lanes: behind which my device reads and writes memory of my domain, and of those to whom something goes.
            passages: what goes. What comes from other domains is waited for by itself; so at its end a call is behind
                my domain alone, whose devices write and read my memory.
        """
        near_ranks = self.rails.near_ranks
        receivers = (part.receiver for passage in passages for part in passage.leaving if part.num_rows)
        return {**dict.fromkeys(lanes, sorted({*near_ranks, *receivers})), LANE_DONE: near_ranks}

    def come(self, call: Call, lane: int, ranks: Collection[int]) -> list[int]:
        """Those of some ranks whose hosts have come so far with a call, a stream; it then awaits the others.

        Raises:
            PeerFailed, or what the peer raised: one gave up on the call, so what its counter says is not true.
        """
        sequencer = self._exchange.sequencer
        call.awaiting = sequencer.behind(lane, call, ranks)
        sequencer.check_notices(call)
        return [rank for rank in ranks if rank not in call.awaiting]

    def tell(self, call: Call, lane: int, rank: int) -> None:
        """Tells one rank's host that mine has come so far with a call, on a lane that is for nothing else."""
        before = self._told.get((rank, lane), 0)
        self._told[rank, lane] = call.sequence + 1
        self._exchange.transport.signal(rank, lane, call.sequence + 1 - before)

    def crossings_of(self, routing: Routing) -> torch.Tensor | None:
        """`[R, 2, D]` int32 of a complete routing; None if it is not."""
        if routing.crossings is not None or routing.stamp is None:
            return routing.crossings
        return routing.stamp[2:].view(-1, 2, self.topology.num_domains).to(torch.int32)

    def crossing_rows(self, numbers: torch.Tensor) -> int:
        """What crosses between domains over rails, of all ranks together, if `[R, D]` goes, or comes."""
        is_other = self.rails.domain_of_rank[:, None] != torch.arange(self.topology.num_domains)
        return int(numbers[is_other].sum())

    def near(self, routes: torch.Tensor) -> torch.Tensor:
        """`[T, P]` routes into my own domain; -1 in place of the others. By the device's work."""
        return torch.where(self._is_near[routes >> ROW_BITS], routes, -1)

    def by_domain(self, arrays: Mapping[int, Sequence[int]]) -> list[list[int]]:
        """By array and domain, given the addresses of the arrays of a rank in each; 0 where there is none."""
        found = [[0] * self.topology.num_domains for _ in next(iter(arrays.values()))]
        for rank, addresses in arrays.items():
            for where, address in zip(found, addresses, strict=True):
                where[self.topology.domain_of[rank]] = address
        return found

    def routes_of(self, routing: Routing, source: int, ids: torch.Tensor) -> torch.Tensor:
        """`[n, K]` int64: where rows of another rank's tokens lie in my domain. By the device's work.

        Arguments:
            routing: of the call, with counts.
            source: the rank.
            ids: `[n, K]` of all its tokens that have an expert here, -1 for experts of other domains; as the rank's
                device has put them, for which this device has waited.
        """
        exchange = self._exchange
        assert routing.counts is not None
        form = (routing.layout, routing.expert_alignment, routing.capacity)
        bases = plan_exchange(routing.counts.numpy(), exchange.placement, source, *form).bases
        plan = exchange.kernels.plan_flat if routing.layout == "flat" else exchange.kernels.plan_expert_major
        routes = plan(ids, exchange.expert_rank, self.queue.upload(torch.from_numpy(bases)))
        return self.queue.unless_failed(routes)

    def domain_routes(self, topk_idx: torch.Tensor, *, with_own: bool) -> torch.Tensor:
        """`[T, K]` int64: a route for each domain of a token, ascending, to its row there. By the device's work.

        Arguments:
            topk_idx: `[T, K]` of all tokens.
            with_own: my own domain counts as well.
        """
        no_bases = self._no_bases[: self.topology.num_domains]
        return self._exchange.kernels.plan_flat(topk_idx, self.domains(with_own), no_bases)

    def domains(self, with_own: bool) -> torch.Tensor:
        """`[E]` int32: the domain of each expert; without my own, -1 for those that are there."""
        return self.expert_domain if with_own else self.other_domain

    def pack(
        self,
        planes: Tensors,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        addresses: Sequence[Sequence[int]],
        *,
        with_own: bool = False,
    ) -> None:
        """Writes what goes to the rails: rows, ids and weights. By the device's work.

        Arguments:
            planes: of the rows of all tokens.
            topk_idx: `[T, K]` of all tokens.
            topk_weights: `[T, K]`, or None.
            addresses: by array and domain, where it goes: planes, ids `[n, K]` int32, -1 for experts of other domains,
                and weights, if there are any.
            with_own: something goes to my own domain as well.
        """
        kernels, routes = self._exchange.kernels, self.domain_routes(topk_idx, with_own=with_own)
        for plane, where in zip(planes, addresses, strict=False):
            kernels.push_rows(plane, routes, where)
        at_ids, *at_weights = addresses[len(planes) :]
        kernels.push_flat_metadata(
            topk_idx,
            topk_weights,
            routes,
            expert_rank=self.domains(with_own),
            expert_local=self._expert_ids,
            idx_addresses=at_ids,
            weight_addresses=None if topk_weights is None else at_weights[0],
        )
