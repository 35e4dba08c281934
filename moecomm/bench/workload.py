"""What is exchanged in one case, and what the answers must be.

Rows are random, the same for every backend, and a function of (seed, rank) alone: every rank can make every other
rank's rows, so what must arrive where is known exactly without communication. Where each row belongs comes from the
oracle (`moecomm.testing.reference_dispatch`), run on rows of one element.

Symbols: T tokens of a rank, H hidden, K top-k, E experts, R ranks, N rows that this rank receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from moecomm.bench.config import BenchConfig, Routing
from moecomm.placement import Placement
from moecomm.testing import hot_expert, limited_to_groups, masked, reference_dispatch, uniform, zipf
from moecomm.testing.oracle import ReferenceReceived

__all__ = ["Inputs", "Payload", "Workload", "expert_scale", "make_routing"]


@dataclass(frozen=True)
class Inputs:
    """What one rank dispatches.

    Arguments:
        x: `[T, H]` rows.
        topk_idx: `[T, K]` int64, -1 = no expert.
        topk_weights: `[T, K]` float32, positive.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor


@dataclass(frozen=True)
class Payload:
    """Rows of one rank.

    Arguments:
        received: rows that arrive at it, its own included.
        received_local: those of them that it sent itself.
        routed: routes of its own tokens: rows that it sends, and that come back to it.
        routed_local: those of them whose expert it hosts.
        needed: by host, tokens of its own with an expert there: rows that must reach that host; 0 for its own host.
        routed_far: routes of its own tokens whose expert is on another host.
    """

    received: int
    received_local: int
    routed: int
    routed_local: int
    needed: tuple[int, ...]
    routed_far: int


def make_routing(
    routing: Routing,
    num_tokens: int,
    num_experts: int,
    num_topk: int,
    *,
    seed: int,
    host_of_expert: Tensor | None = None,
) -> Tensor:
    """`topk_idx` `[num_tokens, num_topk]` int64 of the kind asked for; `limited` needs `host_of_expert` `[E]` int64.

    Raises:
        ValueError: a parameter that these sizes do not allow.
    """
    sizes = (num_tokens, num_experts, num_topk)
    if routing.kind == "zipf":
        assert routing.parameter is not None
        return zipf(*sizes, seed=seed, max_over_mean=routing.parameter)
    if routing.kind == "masked":
        assert routing.parameter is not None
        return masked(*sizes, seed=seed, fraction=routing.parameter)
    if routing.kind == "limited":
        assert routing.parameter is not None
        assert host_of_expert is not None
        limit = int(routing.parameter)
        return limited_to_groups(*sizes, seed=seed, group_of_expert=host_of_expert, num_limited_groups=limit)
    return hot_expert(*sizes, seed=seed) if routing.kind == "hot" else uniform(*sizes, seed=seed)


def expert_scale(num_experts: int) -> Tensor:
    """`[E]` float32, by what the benchmark's experts multiply rows.

    Powers of two, so that products are exact in every dtype; those of neighbours differ, so that a row that comes back
    from the wrong expert is seen.
    """
    return torch.exp2((torch.arange(num_experts) % 4 - 1).to(torch.float32))


@final
class Workload:
    """The inputs of all ranks for one case, this rank's share of the work, and its expected answers.

    Arguments:
        config: the run.
        num_tokens: tokens per rank in this case.
        rank: whose.
        check: whether answers will be expected; if not, only this rank's rows are kept.
    """

    def __init__(self, config: BenchConfig, num_tokens: int, rank: int, *, check: bool) -> None:
        self._config = config
        self._num_tokens = num_tokens
        self._topology = config.topology
        # `[E]` int64
        self._host_of_expert = torch.tensor(self._topology.host_of)[
            Placement(config.experts, config.ranks).expert_rank.to(torch.int64)
        ]
        ranks = range(config.ranks)
        self._topk_idxs = [self._topk_idx(r) for r in ranks]
        weights = [self._topk_weights(r) for r in ranks]
        xs = [self._rows(r) for r in ranks] if check else []
        own = xs[rank] if check else self._rows(rank)
        self.inputs = Inputs(own, self._topk_idxs[rank], weights[rank])
        self._received = self._oracle(rank, weights)
        sources = self._received.sources
        # All ranks' rows one below the other, and where in it each received row comes from.
        self._all_rows = torch.cat(xs) if check else None
        self._origins = sources[:, 0] * num_tokens + sources[:, 1]
        local_expert = torch.arange(self._received.num_tokens_per_expert.shape[0])
        self._first_expert = sum(self._num_local_experts(r) for r in range(rank))
        self._expert_of_row = self._first_expert + local_expert.repeat_interleave(
            self._received.num_tokens_per_expert.to(torch.int64)
        )
        local = int((sources[:, 0] == rank).sum())
        self.payload = Payload(
            received=sources.shape[0],
            received_local=local,
            routed=int((self.inputs.topk_idx >= 0).sum()),
            routed_local=local,
            **self._far_rows(rank),
        )

    @property
    def num_tokens_per_expert(self) -> Tensor:
        """`[E_local]` int32, rows that each local expert must receive."""
        return self._received.num_tokens_per_expert

    @property
    def received_weights(self) -> Tensor:
        """`[N]` float32, weights that must arrive."""
        assert self._received.topk_weights is not None
        return self._received.topk_weights

    def received_rows(self, first: int, last: int) -> Tensor:
        """Rows `first` to `last` of what must arrive, `[last - first, H]`."""
        assert self._all_rows is not None, "made without check"
        return self._all_rows.index_select(0, self._origins[first:last])

    def row_scale(self) -> Tensor:
        """`[N, 1]` of the rows' dtype: by what the expert of each received row multiplies it."""
        return expert_scale(self._config.experts)[self._expert_of_row].to(self.inputs.x.dtype).unsqueeze(1)

    def slab_scale(self) -> Tensor:
        """`[E_local, 1, 1]` of the rows' dtype: by what each local expert multiplies its slab."""
        scale = expert_scale(self._config.experts)[self._first_expert :][: self.num_tokens_per_expert.shape[0]]
        return scale.to(self.inputs.x.dtype).view(-1, 1, 1)

    def combined(self, first: int, last: int, *, scaled: bool, per_host: bool = False) -> tuple[Tensor, Tensor]:
        """What tokens `first` to `last` must get back.

        Arguments:
            scaled: whether experts multiply by `expert_scale`, or give rows back as they came.
            per_host: whether the sum is made of sums per host, by host in ascending order, each made like the whole
                and rounded to the rows' dtype.

        Returns:
            The sum over routes in ascending k of weight x row, product and sum each rounded to float32 (float64 for
            float64), not yet rounded to the rows' dtype, `[last - first, H]`; and the same sum of absolute values.
        """
        inputs = self.inputs
        accumulator = torch.promote_types(inputs.x.dtype, torch.float32)
        scale = expert_scale(self._config.experts).to(accumulator)
        rows = inputs.x[first:last].to(accumulator)
        magnitude = torch.zeros_like(rows)
        totals = [torch.zeros_like(rows) for _ in range(self._topology.num_hosts if per_host else 1)]
        for k in range(self._config.topk):
            expert = inputs.topk_idx[first:last, k]
            weight = torch.where(expert >= 0, inputs.topk_weights[first:last, k], 0.0).to(accumulator).unsqueeze(1)
            term = rows * scale[expert.clamp_min(0)].unsqueeze(1) if scaled else rows
            term = weight * term
            host = self._host_of_expert[expert.clamp_min(0)].unsqueeze(1)
            for number, total in enumerate(totals):
                total += term if len(totals) == 1 else torch.where(host == number, term, 0.0)
            magnitude += term.abs()
        if len(totals) == 1:
            return totals[0], magnitude
        rounded = [total.to(inputs.x.dtype).to(accumulator) for total in totals]
        return torch.stack(rounded).cumsum(0)[-1], magnitude

    def _far_rows(self, rank: int) -> dict[str, Any]:
        """The parts of the payload that leave the host of `rank`."""
        topk_idx, mine = self._topk_idxs[rank], self._topology.host_of[rank]
        host = torch.where(topk_idx >= 0, self._host_of_expert[topk_idx.clamp_min(0)], mine)
        others = [other for other in range(self._topology.num_hosts) if other != mine]
        needed = {other: int((host == other).any(dim=1).sum()) for other in others}
        return {
            "needed": tuple(needed.get(other, 0) for other in range(self._topology.num_hosts)),
            "routed_far": int((host != mine).sum()),
        }

    def _oracle(self, rank: int, weights: list[Tensor]) -> ReferenceReceived:
        narrow = [torch.zeros(self._num_tokens, 1)] * self._config.ranks
        return reference_dispatch(narrow, self._topk_idxs, weights, num_experts=self._config.experts, rank=rank)

    def _num_local_experts(self, rank: int) -> int:
        quotient, remainder = divmod(self._config.experts, self._config.ranks)
        return quotient + (rank < remainder)

    def _seed(self, rank: int, purpose: int) -> int:
        return (self._config.seed * 4096 + rank) * 4 + purpose

    def _rows(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed(rank, 0))
        rows = torch.randn(self._num_tokens, self._config.hidden, generator=generator)
        dtype: torch.dtype = getattr(torch, self._config.dtype)
        return rows.to(dtype)

    def _topk_weights(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed(rank, 1))
        return torch.rand(self._num_tokens, self._config.topk, generator=generator).softmax(dim=1)

    def _topk_idx(self, rank: int) -> Tensor:
        config = self._config
        return make_routing(
            *(config.routing, self._num_tokens, config.experts, config.topk),
            seed=self._seed(rank, 2),
            host_of_expert=self._host_of_expert,
        )
