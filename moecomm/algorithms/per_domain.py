"""Sums made domain by domain, where all rows can be read: the order that `reduce="per_host"` promises."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moecomm.codecs.base import RowFormat
from moecomm.kernels.base import ROW_BITS, make_route
from moecomm.topology import Topology

__all__ = ["reduce_per_domain"]


def reduce_per_domain(
    row_format: RowFormat,
    routes: torch.Tensor,
    addresses: Sequence[Sequence[int]],
    weights: torch.Tensor | None,
    topology: Topology,
) -> torch.Tensor:
    """As `RowFormat.reduce`, but each domain's rows are summed first, and the sums are added in ascending domain.

    Arguments:
        row_format, addresses, weights: as there; one plane.
        routes: `[T, P]` int64.
        topology: which rank is in which domain.

    Returns:
        `[T, H]`; zero where a token has no route.
    """
    num_tokens = routes.shape[0]
    domain_of_rank = torch.tensor(topology.domain_of)
    domains = torch.where(routes >= 0, domain_of_rank[(routes >> ROW_BITS).clamp(min=0)], -1)
    sums = []
    sum_routes = torch.full((num_tokens, topology.num_domains), -1, dtype=torch.int64)
    for domain in range(topology.num_domains):
        is_there = domains == domain
        sums.append(row_format.reduce(num_tokens, torch.where(is_there, routes, -1), addresses, weights))
        tokens = is_there.any(dim=1).nonzero().squeeze(1)
        sum_routes[tokens, domain] = make_route(domain, 0) + tokens
    return row_format.reduce(num_tokens, sum_routes, [[one.data_ptr() for one in sums]], None)
