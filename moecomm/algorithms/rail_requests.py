"""What a rank asks of its rails in a combine: sums of its tokens' rows there, one row for each entry.

Summed at home in the promised order, a token's rows must come one by one: an entry for each. Only where all of a
token's rows lie in one domain can they be summed there and give the same bits. With `reduce="per_host"` each token has
one entry per domain.

T tokens   K num_topk   P slots of `routes`   n entries of a domain   M entries in all
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moecomm.algorithms.rails import Entries, Rails
from moecomm.algorithms.routing import Routing
from moecomm.kernels.base import ROW_BITS, make_route

__all__ = ["Requests", "requests_for", "requests_per_domain"]


class Requests(NamedTuple):
    """What one rank asks for, and how its tokens' sums are made of what comes.

    Attributes:
        entries: per other domain from which something comes, in the order in which the answers lie.
        is_whole: per domain `[n]` bool: the rail sums, and weighs, the entry; else it is a row, weighed at home.
        routes: `[T, P]` int64: rows to be added at home. Rank R stands for the answers, R + 1 (per domain) for the sums
            of my own domain.
        finished: `[m]` int64 tokens, ascending, whose sum is one answer as it came, and `[m]` int64, which.
        near: per domain: entries of my own domain, to be summed here; else None.
    """

    entries: list[Entries]
    is_whole: list[torch.Tensor]
    routes: torch.Tensor
    finished: tuple[torch.Tensor, torch.Tensor]
    near: Entries | None

    @property
    def num_rows(self) -> int:
        """M: answers in all."""
        return sum(len(one.tokens) for one in self.entries)


def requests_for(rails: Rails, routing: Routing) -> Requests:
    """Requests that lead to the same bits as if all rows were read where they lie."""
    assert routing.routes is not None
    topk_idx, routes, num_ranks = routing.topk_idx, routing.routes, rails.placement.num_ranks
    is_flat = routing.layout == "flat"
    ranks = torch.where(routes >= 0, routes >> ROW_BITS, num_ranks)
    domains = torch.cat((rails.domain_of_rank, rails.domain_of_rank.new_tensor([rails.topology.num_domains])))[ranks]
    id_ranks = torch.where(topk_idx >= 0, rails.placement.expert_rank[topk_idx.clamp(min=0).long()].long(), -1)
    num_slots = (routes >= 0).sum(dim=1)
    home_routes = torch.where(domains == rails.domain, routes, -1)
    entries, is_whole, finished, row = [], [], [], 0
    for domain in _others(rails):
        is_there = domains == domain
        is_lone = (is_there.sum(dim=1) == num_slots) & (num_slots > 0)
        # Of a token that is all there only the first slot makes an entry, which stands for all.
        is_first = is_there & (is_there.cumsum(dim=1) == 1)
        tokens, slots = torch.where(is_lone[:, None], is_first, is_there).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        whole = is_lone[tokens]
        if is_flat:
            is_meant = id_ranks[tokens] == ranks[tokens, slots][:, None]
        else:
            is_meant = torch.arange(topk_idx.shape[1]) == slots[:, None]
        is_meant = torch.where(whole[:, None], topk_idx[tokens] >= 0, is_meant)
        ids = torch.where(is_meant, topk_idx[tokens], -1).to(rails.id_dtype).contiguous()
        entries.append(Entries(domain, tokens, ids))
        is_whole.append(whole)
        answers = torch.arange(row, row + len(tokens))
        home_routes[tokens[~whole], slots[~whole]] = make_route(num_ranks, 0) + answers[~whole]
        finished.append((tokens[whole], answers[whole]))
        row += len(tokens)
    return Requests(entries, is_whole, home_routes, _joined(finished), None)


def requests_per_domain(rails: Rails, routing: Routing) -> Requests:
    """Requests for one sum per token and domain; sums are added in ascending domain."""
    topk_idx, num_ranks = routing.topk_idx, rails.placement.num_ranks
    per_domain = rails.entries(topk_idx, range(rails.topology.num_domains))
    concerned = torch.zeros(topk_idx.shape[0], len(per_domain), dtype=torch.bool)
    for one in per_domain:
        concerned[one.tokens, one.domain] = True
    num_columns = max(1, min(topk_idx.shape[1], len(per_domain)))
    routes = torch.full((topk_idx.shape[0], num_columns), -1, dtype=torch.int64)
    columns = concerned.cumsum(dim=1) - 1
    entries, row = [], 0
    for domain in _others(rails):
        one = per_domain[domain]
        if len(one.tokens):
            answers = torch.arange(row, row + len(one.tokens))
            routes[one.tokens, columns[one.tokens, domain]] = make_route(num_ranks, 0) + answers
            entries.append(one)
            row += len(one.tokens)
    near = per_domain[rails.domain]
    routes[near.tokens, columns[near.tokens, rails.domain]] = make_route(num_ranks + 1, 0) + torch.arange(
        len(near.tokens)
    )
    nothing = torch.empty(0, dtype=torch.int64)
    whole = [torch.ones(len(one.tokens), dtype=torch.bool) for one in entries]
    return Requests(entries, whole, routes, (nothing, nothing), near)


def _others(rails: Rails) -> list[int]:
    """The other domains, those behind mine first."""
    num = rails.topology.num_domains
    return [(rails.domain + step) % num for step in range(1, num)]


def _joined(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    nothing = torch.empty(0, dtype=torch.int64)
    tokens, order = torch.cat([nothing, *(tokens for tokens, _ in pairs)]).sort()
    return tokens, torch.cat([nothing, *(answers for _, answers in pairs)])[order]
