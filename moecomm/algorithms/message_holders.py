"""In whose memory low-latency messages lie: a far domain's in that of my rail there, where all of its ranks read them.

    rank 0 --- to its rail of domain 1 ---> rank 2's memory <--- read by rank 2, and by rank 3
    rank 1 --- to its rail of domain 1 ---> rank 3's memory <--- read by rank 3, and by rank 2

E experts   R ranks
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from moecomm.algorithms.hops import Promise, Way
from moecomm.placement import Placement
from moecomm.topology import Topology

__all__ = ["MessageHolders"]


class MessageHolders:
    """Who holds the messages of one rank, and those to it.

    Arguments:
        topology: of the group.
        placement: which rank hosts which expert.
        rank: mine.
        way: `direct`: every rank holds the messages to it. Else that holds inside domains; a message to another domain
            is one for all of its ranks, and the sender's rail there holds it.

    Attributes:
        over_rails: some message is one for a whole domain.
        holders: the ranks that hold a message of mine each, ascending.
        expert_holder: `[E]` int32: for each expert the index of the holder of my message to its rank.
        far: indices of the holders in other domains, those behind me first, so that the ranks spread over different
            receivers.
        sources: per rank, who holds its message to me.
        lanes: where I must look whether messages have come that others hold: pairs of holder and source, fixed.
        domain_experts, domain_sources: see `moecomm.kernels.eager.Home`; None where messages are for one rank each.
    """

    def __init__(self, topology: Topology, placement: Placement, rank: int, way: Way) -> None:
        ranks, domain_of = range(topology.num_ranks), topology.domain_of
        self.over_rails = way != "direct" and 1 < topology.num_domains < topology.num_ranks
        domain = domain_of[rank]

        def holder(source: int, destination: int) -> int:
            is_near = domain_of[source] == domain_of[destination]
            return destination if is_near or not self.over_rails else topology.rail(source, domain_of[destination])

        mine = [holder(rank, destination) for destination in ranks]
        self.holders = sorted(set(mine))
        places = torch.tensor([self.holders.index(one) for one in mine], dtype=torch.int32)
        self.expert_holder = places[placement.expert_rank.long()]
        far = [place for place, one in enumerate(self.holders) if domain_of[one] != domain]
        self.far = sorted(far, key=lambda place: (self.holders[place] - rank) % len(ranks))
        self.sources = [holder(source, rank) for source in ranks]
        self.lanes = [
            (one, source) for source, one in enumerate(self.sources) if one != rank and domain_of[source] != domain
        ]
        self.domain_experts: torch.Tensor | None = None
        self.domain_sources: torch.Tensor | None = None
        self._topology, self._placement, self._domain = topology, placement, domain
        if self.over_rails:
            domains = torch.tensor(domain_of)
            self.domain_experts = domains[placement.expert_rank.long()] == domain
            self.domain_sources = domains != domain

    def promise(self, num_topk: int) -> Promise:
        """How often a token of K = `num_topk` experts crosses between domains, over rails and from rank to rank."""
        topology, num_experts = self._topology, self._placement.num_experts
        hosted = np.diff(self._placement.first_expert).tolist()
        others = [topology.ranks_in(d) for d in range(topology.num_domains) if d != self._domain]
        chosen = min(num_topk, num_experts)

        def crossings(experts: Iterable[int]) -> float:
            """Of how many of these parts, with so many experts each, a token has some on average."""
            ways = math.comb(num_experts, chosen)
            return sum(1 - math.comb(num_experts - count, chosen) / ways for count in experts)

        direct = crossings(hosted[rank] for ranks in others for rank in ranks)
        return Promise(self.over_rails, direct, crossings(sum(hosted[rank] for rank in ranks) for ranks in others))
