"""What a case must give, by the oracle: computed once for all ranks that are threads of a process.

R ranks, N rows that a rank receives.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from moecomm.algorithms.plan import Layout
from moecomm.testing.contracts.cases import Case, Inputs, random_rows
from moecomm.testing.oracle import ReferenceReceived, reference_combine, reference_dispatch

__all__ = ["Expected", "expected_of"]

_SUMMABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MOST_KEPT = 32
_lock = threading.Lock()


class Expected:
    """One exchange of all ranks. All of it is shared by ranks, so nobody writes to it.

    Arguments:
        case: sizes and routing.
        inputs: by rank, what is dispatched.
        layout: of what is received; None = that of the case.
        capacity: see `reference_dispatch`.
        seed: of the expert outputs.

    Attributes:
        inputs: as given.
        received: by rank, what dispatch gives.
        ys: by rank, expert outputs `[N, H]` (slab: `[E_local, capacity, H]`): random, NaN where no row is, since
            padding must never be looked at. Empty for dtypes that cannot be summed.
    """

    def __init__(
        self, case: Case, inputs: Sequence[Inputs], layout: Layout | None = None, capacity: int = 0, seed: int = 0
    ) -> None:
        self.inputs = list(inputs)
        self._layout, self._capacity = layout or case.layout, capacity
        self._num_experts = case.num_experts
        self._expert_alignment = case.expert_alignment if self._layout != "slab" else 1
        ranks = range(case.num_ranks)
        self.received = [self._receive(rank) for rank in ranks]
        self.ys: list[Tensor] = []
        if case.dtype in _SUMMABLE:
            self.ys = [random_rows(tuple(self.received[r].x.shape), case.dtype, f"y {seed} {r}") for r in ranks]
            for y, one in zip(self.ys, self.received, strict=True):
                y.view(-1, case.hidden)[one.sources[:, 0] < 0] = float("nan")

    def _receive(self, rank: int) -> ReferenceReceived:
        return reference_dispatch(
            [one.x for one in self.inputs],
            [one.topk_idx for one in self.inputs],
            [one.topk_weights for one in self.inputs],
            num_experts=self._num_experts,
            rank=rank,
            layout=self._layout,
            expert_alignment=self._expert_alignment,
            capacity=self._capacity,
        )

    def home(
        self,
        rank: int,
        topk_weights: Tensor | None = None,
        *,
        ys: Sequence[Tensor] | None = None,
        domain_of: Sequence[int] | None = None,
    ) -> Tensor:
        """What combine gives to `rank` when each rank gives its part of `ys` (None: the attribute)."""
        return reference_combine(
            self.ys if ys is None else ys,
            [one.topk_idx for one in self.inputs],
            num_experts=self._num_experts,
            rank=rank,
            topk_weights=topk_weights,
            layout=self._layout,
            expert_alignment=self._expert_alignment,
            capacity=self._capacity,
            domain_of=domain_of,
        )


def expected_of(
    case: Case, seed: int = 0, layout: Layout | None = None, capacity: int = 0, rows_seed: int | None = None
) -> Expected:
    """What `case` gives with these seeds: of the routing, and of the rows (None = the same)."""
    # Ranks that are threads ask at the same time; the lock lets one compute, and the others wait for it.
    with _lock:
        return _made(case, seed, layout, capacity, seed if rows_seed is None else rows_seed)


@functools.lru_cache(_MOST_KEPT)
def _made(case: Case, seed: int, layout: Layout | None, capacity: int, rows_seed: int) -> Expected:
    inputs = [case.inputs(rank, seed) for rank in range(case.num_ranks)]
    if rows_seed != seed:
        others = [case.inputs(rank, rows_seed).x for rank in range(case.num_ranks)]
        inputs = [Inputs(x, one.topk_idx, one.topk_weights) for x, one in zip(others, inputs, strict=True)]
    return Expected(case, inputs, layout, capacity, seed)
