"""What goes over the rails, from one rank's point of view: which of its tokens concern which domain.

T tokens   K num_topk   E experts   R ranks   D domains   n entries
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from moecomm.algorithms.plan import Layout, plan_exchange
from moecomm.algorithms.routing import Routing
from moecomm.kernels.base import ROW_BITS, RowKernels
from moecomm.placement import Placement
from moecomm.topology import Topology

__all__ = ["Entries", "RailRoutes", "Rails", "copy_rows", "tensor_at"]


class Entries(NamedTuple):
    """Rows of one domain: of dispatch one per token, of combine one per row that comes home.

    Attributes:
        domain: which.
        tokens: `[n]` int64, ascending.
        ids: `[n, K]`, contiguous, as they travel: the experts of the domain that the entry is about, -1 elsewhere.
    """

    domain: int
    tokens: torch.Tensor
    ids: torch.Tensor


class Rails:
    """Which expert and which rank is in which domain.

    Arguments:
        topology: of the group.
        placement: which rank hosts which expert.
        rank: mine.

    Attributes:
        topology, placement, rank: as given.
        domain: mine.
        near_ranks: of my domain, ascending.
        id_dtype: in which ids of experts, and -1, travel.
        domain_of_rank: `[R]` int64.
        domain_of_expert: `[E]` int64.
    """

    def __init__(self, topology: Topology, placement: Placement, rank: int) -> None:
        self.topology = topology
        self.placement = placement
        self.rank = rank
        self.domain = topology.domain_of[rank]
        self.near_ranks = topology.ranks_in(self.domain)
        self.id_dtype = torch.int16 if placement.num_experts <= 1 << 15 else torch.int32
        self.domain_of_rank = torch.tensor(topology.domain_of, dtype=torch.int64)
        self.domain_of_expert = self.domain_of_rank[placement.expert_rank.long()]
        crosses = self.domain_of_rank.numpy()[:, None]
        # In numpy, as all that precedes a call's first chunk: an operation of torch that has not been used for a while
        # takes several times as long. Index -1 is no expert, and no rank.
        self._domain_of_id = np.append(self.domain_of_expert.numpy(), topology.num_domains).astype(np.int32)
        self._is_near_rank = np.append(self.domain_of_rank.numpy() == self.domain, False)
        self._is_far_expert = crosses != self.domain_of_expert.numpy()[None, :]
        self._is_far_rank = crosses != self.domain_of_rank.numpy()[None, :]

    def entries(self, topk_idx: torch.Tensor, domains: Iterable[int]) -> list[Entries]:
        """For each of some domains the tokens that have an expert there, with all these experts.

        Arguments:
            topk_idx: `[T, K]` int32 or int64.
            domains: which.
        """
        ids = topk_idx.numpy()
        domain_of, id_dtype = self._domain_of_id[ids], torch.empty(0, dtype=self.id_dtype).numpy().dtype
        made = []
        for domain in domains:
            is_there = domain_of == domain
            tokens = np.flatnonzero(is_there.any(axis=1))
            theirs = np.where(is_there, ids, -1).astype(id_dtype)[tokens]
            made.append(Entries(domain, torch.from_numpy(tokens), torch.from_numpy(theirs)))
        return made

    def near(self, routes: torch.Tensor) -> torch.Tensor:
        """`[T, P]` routes into my own domain; -1 in place of the others."""
        all_routes = routes.numpy()
        return torch.from_numpy(np.where(self._is_near_rank[all_routes >> ROW_BITS], all_routes, -1))

    def direct_rows(self, counts: npt.NDArray[np.int32], layout: Layout) -> int:
        """Rows that cross between domains if each goes to its rank: of all ranks together, whose counts `[R, E + R]`
        are given, or of this one alone, from `[E + R]`.
        """
        sources = slice(None) if counts.ndim == 2 else self.rank
        num_experts = self.placement.num_experts
        if layout == "flat":
            return int(counts[..., num_experts:][self._is_far_rank[sources]].sum(dtype=np.int64))
        return int(counts[..., :num_experts][self._is_far_expert[sources]].sum(dtype=np.int64))

    def concerns(self, counts: npt.NDArray[np.int32], source: int, domain: int) -> bool:
        """Whether a rank has any route into a domain."""
        experts = self.domain_of_expert.numpy() == domain
        return bool(counts[source, : self.placement.num_experts][experts].any())


class RailRoutes:
    """Where the rows of one source lie in my domain, worked out entry by entry, as they come.

    Arguments:
        kernels: of the rows.
        placement: which rank hosts which expert.
        routing: of the call; complete but for the routes.
        source: whose rows they are.
    """

    def __init__(self, kernels: RowKernels, placement: Placement, routing: Routing, source: int) -> None:
        assert routing.counts is not None
        self._kernels = kernels
        self._placement = placement
        self._is_flat = routing.layout == "flat"
        plan = plan_exchange(
            routing.counts.numpy(), placement, source, routing.layout, routing.expert_alignment, routing.capacity
        )
        self._bases = torch.from_numpy(plan.bases.copy())
        self._counts = torch.empty(placement.num_experts + placement.num_ranks, dtype=torch.int32)

    def next_routes(self, ids: torch.Tensor) -> torch.Tensor:
        """Routes `[n, K]` int64 of the entries that follow, with ids `[n, K]` int32."""
        kernels, placement = self._kernels, self._placement
        plan = kernels.plan_flat if self._is_flat else kernels.plan_expert_major
        routes = plan(ids, placement.expert_rank, self._bases)
        kernels.count_routes(ids, placement.expert_rank, placement.num_ranks, self._counts)
        experts = placement.num_experts
        self._bases += self._counts[experts:] if self._is_flat else self._counts[:experts]
        return routes


def tensor_at(address: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor on memory of this process, which it does not keep alive."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(*shape, dtype=dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(*shape)


def copy_rows(tensor: torch.Tensor, begin: int, end: int, address: int) -> None:
    """Copies rows of a contiguous tensor to memory of this process: `tensor_at(...).copy_` in a tenth of the time."""
    assert tensor.is_contiguous()
    row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    ctypes.memmove(address, tensor.data_ptr() + begin * row_bytes, (end - begin) * row_bytes)
