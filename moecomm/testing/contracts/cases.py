"""The inputs that an exchange has to get right, as plain values: sizes, dtypes, routings, layouts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moecomm.algorithms.plan import Layout
from moecomm.testing import routing
from moecomm.testing.data import rows_with_origin

__all__ = ["Case", "Inputs", "cases_for", "random_rows"]

_TOKENS = {
    1: (5,),
    2: (5, 6),
    3: (4, 0, 9),
    4: (3, 0, 8, 1),
    8: (2, 0, 1, 5, 3, 0, 7, 4),
}


@dataclass(frozen=True)
class Case:
    """One exchange. T tokens, H hidden, K top-k, E experts.

    Attributes:
        name: for messages.
        tokens: T of each rank.
        hidden, num_experts, num_topk: H, E, K.
        dtype: of the rows.
        idx_dtype: of topk_idx.
        routing: name of a generator in `moecomm.testing.routing`.
        layout, expert_alignment: of what is received.
        strided: inputs are views with gaps, and there is poison in the gaps.
    """

    name: str
    tokens: tuple[int, ...]
    hidden: int
    num_experts: int
    num_topk: int
    dtype: torch.dtype = torch.bfloat16
    idx_dtype: torch.dtype = torch.int64
    routing: str = "uniform"
    layout: Layout = "expert_major"
    expert_alignment: int = 1
    strided: bool = False

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.tokens)

    def inputs(self, rank: int, seed: int = 0) -> Inputs:
        """What `rank` passes to dispatch; every rank can compute it, so no rank has to send it for the oracle."""
        num_tokens, number = self.tokens[rank], 1000 * seed + rank
        generators: dict[str, Callable[..., Tensor]] = {
            "all_to_one_rank": partial(routing.all_to_one_rank, num_ranks=self.num_ranks, rank=self.num_ranks // 2),
        }
        make = generators.get(self.routing) or getattr(routing, self.routing)
        topk_idx = make(num_tokens, self.num_experts, self.num_topk, seed=number).to(self.idx_dtype)
        weights = torch.rand(num_tokens, self.num_topk, generator=torch.Generator().manual_seed(number))
        weights = weights.masked_fill(topk_idx < 0, float("nan"))  # must never be looked at
        try:
            x = rows_with_origin(rank, num_tokens, self.hidden, self.dtype, num_ranks=self.num_ranks)
        except ValueError:  # too narrow for that
            x = random_rows((num_tokens, self.hidden), self.dtype, f"x {number}")
        if seed:  # another batch of the same shape: other rows, too
            x = random_rows((num_tokens, self.hidden), self.dtype, f"x {number}")
        if self.strided:
            return Inputs(_with_gaps(x, 3), _with_gaps(topk_idx.t(), 1).t(), _with_gaps(weights, 2))
        return Inputs(x, topk_idx, weights)


@dataclass(frozen=True)
class Inputs:
    """x `[T, H]`, topk_idx `[T, K]`, topk_weights `[T, K]` float32 with NaN where no expert is."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor


def random_rows(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
    """Rows that depend on `name` only: normal numbers, or random bytes for dtypes that are only carried.

    Each name gives other numbers; they differ in size, so that the order of a sum shows in its last bits.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    generator = torch.Generator().manual_seed(seed)
    if dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        rows = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (rows * torch.rand(shape, generator=generator, dtype=torch.float64).mul(6).exp2()).to(dtype)
    data = torch.randint(256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8)
    return data.view(dtype)


def _with_gaps(tensor: Tensor, gap: int) -> Tensor:
    """The same values as a view of a wider tensor; what lies between the rows is poison."""
    wide = torch.full((tensor.shape[0], tensor.shape[1] + gap), 119, dtype=torch.uint8).to(tensor.dtype)
    wide[:, : tensor.shape[1]] = tensor
    return wide[:, : tensor.shape[1]]


def cases_for(num_ranks: int) -> list[Case]:
    """The cases for a number of ranks: every axis in every value, in combinations that have caused trouble."""
    tokens = _TOKENS.get(num_ranks, tuple((7 * rank * rank + 3 * rank + 2) % 9 for rank in range(num_ranks)))
    few = max(1, num_ranks - 1)
    make = partial(Case, tokens=tokens)
    alone = tuple(64 if rank == num_ranks - 1 else 0 for rank in range(num_ranks))
    return [
        make("odd number of experts", hidden=64, num_experts=2 * num_ranks + 1, num_topk=2),
        make(
            "fewer experts than ranks, duplicates, aligned",
            hidden=33,
            num_experts=few,
            num_topk=3,
            dtype=torch.float32,
            idx_dtype=torch.int32,
            routing="with_duplicates",
            expert_alignment=4,
        ),
        make(
            "more choices than experts, flat", hidden=7, num_experts=5, num_topk=8, dtype=torch.float16, layout="flat"
        ),
        make(
            "masked, double, aligned",
            hidden=5,
            num_experts=16,
            num_topk=4,
            dtype=torch.float64,
            routing="masked",
            expert_alignment=8,
        ),
        make("masked, flat, int32", hidden=24, num_experts=11, num_topk=4, layout="flat", routing="masked"),
        make("a hot expert, top-1", hidden=256, num_experts=num_ranks, num_topk=1, routing="hot_expert"),
        make(
            "top-64, flat",
            hidden=16,
            num_experts=70,
            num_topk=64,
            dtype=torch.float32,
            idx_dtype=torch.int32,
            layout="flat",
        ),
        make("top-64", hidden=16, num_experts=70, num_topk=64, dtype=torch.float16, expert_alignment=16),
        make("no routes", hidden=8, num_experts=4, num_topk=2, routing="no_routes", expert_alignment=8),
        make("no routes, flat", hidden=8, num_experts=4, num_topk=2, routing="no_routes", layout="flat"),
        Case("no tokens anywhere", (0,) * num_ranks, hidden=8, num_experts=4, num_topk=2),
        Case("no tokens anywhere, flat", (0,) * num_ranks, hidden=8, num_experts=4, num_topk=2, layout="flat"),
        Case("one token each", (1,) * num_ranks, hidden=1, num_experts=3, num_topk=2, dtype=torch.float32),
        Case("only the last rank has tokens", alone, hidden=40, num_experts=2 * num_ranks, num_topk=3),
        make("bytes", hidden=13, num_experts=6, num_topk=3, dtype=torch.uint8, routing="masked", expert_alignment=2),
        make("float8, flat", hidden=40, num_experts=6, num_topk=3, dtype=torch.float8_e4m3fn, layout="flat"),
        make(
            "columns of one, duplicates, flat",
            hidden=1,
            num_experts=4,
            num_topk=5,
            routing="with_duplicates",
            layout="flat",
        ),
        make("strided inputs", hidden=20, num_experts=9, num_topk=4, strided=True, routing="masked"),
        make("strided inputs, flat", hidden=20, num_experts=9, num_topk=4, strided=True, layout="flat"),
        Case(
            "many tokens to one rank",
            (1025, 1024, 1023, 0, 1, 7, 64, 100)[:num_ranks],
            hidden=2,
            num_experts=max(4, num_ranks),
            num_topk=1,
            dtype=torch.float32,
            routing="all_to_one_rank",
            expert_alignment=128,
        ),
    ]
