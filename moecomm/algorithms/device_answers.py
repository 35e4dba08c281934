"""What comes home over rails in a combine of devices that sums in the promised order, and where each row lies.

A token whose experts all lie in one other domain is whole there: one row comes, the sum, of the same bits as if it were
made at home. Of any other token each far route has a row of its own (flat: each far rank), to be added at home. The
answers of a domain lie in the order of tokens, then of slots. Home numbers them from all of its routes, the rail from
those into its domain and from what home says of each token, so nobody tells anybody where a row lies.

    T tokens   K num_topk   P slots of `routes`   D domains   R ranks
    n tokens of home that have an expert in a rail's domain   A rows with which the rail answers
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.rails import Rails
from moecomm.devices.base import AsynchronousDevice
from moecomm.kernels.base import ROW_BITS

__all__ = ["Asked", "DeviceAnswers"]


class Asked(NamedTuple):
    """What a rank's tokens need from other domains.

    Attributes:
        domains: `[T, P]` int32: which domain answers for this slot with a row of its own; -1: none.
        is_whole: `[T, 1]` bool: the row of the first slot that is a route is the token's sum.
    """

    domains: torch.Tensor
    is_whole: torch.Tensor


class DeviceAnswers:
    """The tables of one rank; all that its methods do is the device's work.

    Arguments:
        exchange: what calls share.
        rails: who is where.
    """

    def __init__(self, exchange: Exchange, rails: Rails) -> None:
        assert isinstance(exchange.device, AsynchronousDevice)
        self._kernels = exchange.device.row_kernels()
        self._domain = rails.domain
        where, num_domains = exchange.device.torch_device, rails.topology.num_domains
        # Index -1, of no route, is the last one.
        self._domain_of_rank = torch.cat((rails.domain_of_rank, torch.tensor([-1]))).to(torch.int32).to(where)
        self._domains = torch.arange(num_domains, dtype=torch.int32, device=where)
        # To who numbers rows a domain is an expert, and its answers are a rank behind the others.
        self._answering = self._domains + rails.placement.num_ranks
        self._rows = torch.zeros(1, dtype=torch.int32, device=where)

    def asked(self, routes: torch.Tensor) -> Asked:
        """What is asked for, given `[T, P]` routes, or such whose rows are not known yet."""
        domains = self._domain_of_rank[routes >> ROW_BITS]
        is_route = domains >= 0
        last = domains.amax(dim=1, keepdim=True)
        is_one = ((domains == last) | ~is_route).all(dim=1, keepdim=True)
        is_whole = is_one & (last >= 0) & (last != self._domain)
        is_asked = is_route & (domains != self._domain)
        return Asked(torch.where(is_asked & (~is_whole | _is_first(is_route)), domains, -1), is_whole)

    def count(self, routes: torch.Tensor, totals: torch.Tensor) -> None:
        """Leaves in `totals` `[D]` int64 how many rows each domain answers."""
        slots = self.asked(routes).domains.view(-1, 1)
        self._kernels.count_tokens(slots, self._domains, len(totals), totals)

    def at_home(self, asked: Asked, starts: torch.Tensor) -> torch.Tensor:
        """`[T, P]` int64: routes to the answers that are asked for; domain d's are those of rank R + d.

        Arguments:
            asked: of the call.
            starts: `[D]` int64: the number of each domain's first answer.
        """
        return self._kernels.plan_expert_major(asked.domains, self._answering, starts)

    def at_rail(
        self, routes: torch.Tensor, is_whole: torch.Tensor, weights: torch.Tensor | None, num_answers: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """How answers to one home are made of rows of my domain, as `RowFormat.reduce` wants it.

        Arguments:
            routes: `[n, P]` int64: of home's tokens, into my domain.
            is_whole: `[n, 1]` bool: as home says.
            weights: `[n, P]`, or None. Rows that are added at home are weighed there.
            num_answers: A.

        Returns:
            `[A, P]` int64 routes, and their weights.
        """
        is_route = routes >= 0
        slots = torch.where(is_route & (~is_whole | _is_first(is_route)), 0, -1).to(torch.int32)
        rows = self._kernels.plan_expert_major(slots, self._rows, self._rows.long())
        rows = torch.where(is_whole, rows.amax(dim=1, keepdim=True), rows)
        # A slot stays in its column, so sums keep their order; what names no row goes to one that nobody reads.
        places = torch.where(is_route, rows, num_answers)
        answers = routes.new_full((num_answers + 1, routes.shape[1]), -1).scatter_(0, places, routes)
        if weights is None:
            return answers[:-1], None
        weights = torch.where(is_whole, weights, 1)
        return answers[:-1], weights.new_ones(answers.shape).scatter_(0, places, weights)[:-1]

    @staticmethod
    def tokens_of(asked: Asked, routes: torch.Tensor, num_answers: int) -> torch.Tensor:
        """`[A]` int64: the token whose sum an answer is; -1 if it is but a row.

        Arguments:
            asked: of the call.
            routes: of `at_home`, if the domains' answers are numbered on.
            num_answers: A, of all domains.
        """
        rows = routes.amax(dim=1) & ((1 << ROW_BITS) - 1)
        rows = torch.where(asked.is_whole.squeeze(1), rows, num_answers)
        tokens = torch.arange(len(rows), device=rows.device)
        return rows.new_full((num_answers + 1,), -1).scatter_(0, rows, tokens)[:-1]


def _is_first(is_route: torch.Tensor) -> torch.Tensor:
    """`[T, P]` bool: the first slot of each token that is a route."""
    return is_route & (is_route.cumsum(dim=1) == 1)
