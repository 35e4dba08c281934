"""Row kernels against kernels/reference.py, by bits.

T tokens   K num_topk   E experts   R ranks   H columns
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from answers import poisoned, wrong_bits
from context import Context
from torch import Tensor

from moecomm.kernels.base import RowKernels, row_of, weights_dtype
from moecomm.kernels.registry import kernels_for
from moecomm.placement import Placement
from moecomm.testing import masked, uniform, with_duplicates
from moecomm.testing.contracts.cases import random_rows

__all__ = ["Memory", "check", "check_push"]

_GUARD = 64
_SUMMABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class _Size(NamedTuple):
    tokens: int
    num_topk: int
    num_experts: int
    num_ranks: int
    columns: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]


_ON_GPU = _Size(150, 8, 64, 4, (3, 7168), (*_SUMMABLE, torch.uint8))
_INTERPRETED = _Size(5, 3, 7, 2, (3, 16), (torch.float32, torch.bfloat16))


@dataclass
class Memory:
    """Rows of every rank in one poisoned allocation, with poisoned guards around each rank's."""

    num_rows: int
    row_bytes: int
    num_ranks: int
    device: torch.device

    def __post_init__(self) -> None:
        self._stride = -(-self.num_rows * self.row_bytes // _GUARD) * _GUARD + _GUARD
        self.bytes = poisoned(_GUARD + self.num_ranks * self._stride, dtype=torch.uint8, device=self.device)

    @property
    def addresses(self) -> list[int]:
        return [self.bytes.data_ptr() + _GUARD + rank * self._stride for rank in range(self.num_ranks)]

    def fill(self, rows: list[Tensor]) -> Memory:
        """Puts rows at each rank, contiguous and of the right size."""
        for rank, each in enumerate(rows):
            begin = _GUARD + rank * self._stride
            self.bytes[begin : begin + self.num_rows * self.row_bytes] = each.view(torch.uint8).flatten()
        return self


class _Check:
    """One run over all row kernels."""

    def __init__(self, kernels: RowKernels, context: Context) -> None:
        self.kernels, self.reference = kernels, kernels_for("reference")
        self.device, self.cpu, self.seed = context.device, torch.device("cpu"), context.seed
        self.size = _ON_GPU if context.timer.is_gpu else _INTERPRETED
        placement = Placement(self.size.num_experts, self.size.num_ranks)
        self.expert_rank, self.expert_local = placement.expert_rank, placement.expert_local
        self.num_rows = 0

    def random(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
        return random_rows(shape, dtype, f"{self.seed} {name}")

    def memories(self, row_bytes: int) -> tuple[Memory, Memory]:
        """On the device, and beside the reference."""
        num_ranks = self.size.num_ranks
        one, other = (Memory(self.num_rows, row_bytes, num_ranks, where) for where in (self.device, self.cpu))
        return one, other

    def routings(self) -> Iterator[tuple[str, Tensor]]:
        tokens, num_topk, num_experts = self.size[:3]
        yield "no tokens", uniform(0, num_experts, num_topk)
        yield "masked", masked(tokens, num_experts, num_topk, seed=self.seed)
        yield "duplicates", with_duplicates(tokens, num_experts, num_topk, seed=self.seed).int()

    def run(self) -> Iterator[tuple[str, str, int]]:
        for routing, ids in self.routings():
            yield "count_routes", routing, self.counts(ids)
            for layout, plan in (("expert_major", self.kernels.plan_expert_major), ("flat", self.kernels.plan_flat)):
                step = ids.numel() + 1
                num_bases = self.size.num_experts if layout == "expert_major" else self.size.num_ranks
                bases = torch.arange(num_bases) * step if layout == "expert_major" else torch.arange(num_bases)
                routes = getattr(self.reference, f"plan_{layout}")(ids, self.expert_rank, bases)
                got = plan(ids.to(self.device), self.expert_rank.to(self.device), bases.to(self.device))
                yield f"plan_{layout}", routing, wrong_bits(got, routes)
                if layout == "flat" or not ids.numel():
                    self.num_rows = 1 + max((row_of(route) for route in routes[routes >= 0].tolist()), default=0)
                    yield from self.moves(f"{routing}, {layout}", routes)
            yield from self.flat(routing, ids)
        # Rows of different experts side by side, as dispatch places them.
        ids = masked(*self.size[:1], self.size.num_experts, self.size.num_topk, seed=self.seed + 1)
        counts = torch.bincount(ids[ids >= 0], minlength=self.size.num_experts)
        routes = self.reference.plan_expert_major(ids, self.expert_rank, counts.cumsum(0) - counts)
        self.num_rows = ids.numel()
        yield from self.moves("expert_major", routes)
        yield from self.dots()

    def counts(self, ids: Tensor) -> int:
        num_experts, num_ranks = self.size.num_experts, self.size.num_ranks
        got, want = (poisoned(num_experts + num_ranks, dtype=torch.int32, device=d) for d in (self.device, self.cpu))
        prints = [
            self.kernels.count_routes(ids.to(self.device), self.expert_rank.to(self.device), num_ranks, got),
            self.reference.count_routes(ids, self.expert_rank, num_ranks, want),
        ]
        again = self.kernels.count_routes(ids.long().to(self.device), self.expert_rank.to(self.device), num_ranks, got)
        return wrong_bits(got, want) + int(prints[0] != again)

    def moves(self, name: str, routes: Tensor) -> Iterator[tuple[str, str, int]]:
        """Pushes and sums of rows and values through given routes."""
        routes_there = routes.to(self.device)
        for dtype in self.size.dtypes:
            for columns in self.size.columns:
                case = f"{name}, {str(dtype).removeprefix('torch.')} x {columns}"
                rows = self.random((routes.shape[0], columns + 3), dtype, case)
                weights = self.random(tuple(routes.shape), weights_dtype(dtype), "weights").masked_fill_(
                    routes < 0, torch.nan
                )
                for scale in (None, weights) if dtype in _SUMMABLE else (None,):
                    there = None if scale is None else scale.to(self.device)
                    got, want = self.memories(columns * dtype.itemsize)
                    copy = rows.to(self.device)[:, :columns]
                    self.kernels.push_rows(copy, routes_there, got.addresses, weights=there)
                    self.reference.push_rows(rows[:, :columns], routes, want.addresses, weights=scale)
                    kind = "" if scale is None else " weighted"
                    yield f"push_rows{kind}", case, wrong_bits(got.bytes, want.bytes)
                    if dtype in _SUMMABLE:
                        yield f"combine_rows{kind}", case, self.sums(routes, columns, dtype, scale)
        for dtype in (torch.float32, torch.float64):
            values = self.random(tuple(routes.shape), dtype, name)
            got, want = self.memories(dtype.itemsize)
            self.kernels.push_values(values.to(self.device), routes_there, got.addresses)
            self.reference.push_values(values, routes, want.addresses)
            yield "push_values", name, wrong_bits(got.bytes, want.bytes)
            back = self.kernels.pull_values(routes_there, got.addresses, dtype=dtype)
            yield "pull_values", name, wrong_bits(back, values.masked_fill(routes < 0, 0.0))

    def sums(self, routes: Tensor, columns: int, dtype: torch.dtype, weights: Tensor | None) -> int:
        rows = [self.random((self.num_rows, columns), dtype, f"{rank}") for rank in range(self.size.num_ranks)]
        there, here = (memory.fill(rows) for memory in self.memories(columns * dtype.itemsize))
        shape = (routes.shape[0], columns)
        got, want = (poisoned(*shape, dtype=dtype, device=where) for where in (self.device, self.cpu))
        on_device = None if weights is None else weights.to(self.device)
        self.kernels.combine_rows(got, routes.to(self.device), there.addresses, weights=on_device)
        self.reference.combine_rows(want, routes, here.addresses, weights=weights)
        return wrong_bits(got, want)

    def pushes(self, name: str, push: Callable[[Tensor, Tensor, list[int]], None]) -> Iterator[tuple[str, str, int]]:
        ids = masked(self.size.tokens, self.size.num_experts, self.size.num_topk, seed=self.seed)
        routes = self.reference.plan_flat(ids, self.expert_rank, torch.arange(self.size.num_ranks))
        self.num_rows = self.size.tokens + self.size.num_ranks
        for dtype in self.size.dtypes:
            for columns in self.size.columns:
                for gap in (0, 3):
                    case = f"{str(dtype).removeprefix('torch.')} x {columns}, {gap} between rows"
                    rows = self.random((self.size.tokens, columns + gap), dtype, case)
                    got, want = self.memories(columns * dtype.itemsize)
                    push(rows.to(self.device)[:, :columns], routes.to(self.device), got.addresses)
                    self.reference.push_rows(rows[:, :columns], routes, want.addresses)
                    yield name, case, wrong_bits(got.bytes, want.bytes)

    def flat(self, name: str, ids: Tensor) -> Iterator[tuple[str, str, int]]:
        """What goes beside flat rows, and back."""
        routes = self.reference.plan_flat(ids, self.expert_rank, torch.arange(self.size.num_ranks))
        num_topk = ids.shape[1]
        there = [tensor.to(self.device) for tensor in (ids, routes, self.expert_rank, self.expert_local)]
        for dtype in (torch.float32, torch.float64):
            weights = self.random(tuple(ids.shape), dtype, name)
            indices, table = self.memories(num_topk * 4), self.memories(num_topk * dtype.itemsize)
            self.kernels.push_flat_metadata(
                there[0],
                weights.to(self.device),
                there[1],
                expert_rank=there[2],
                expert_local=there[3],
                idx_addresses=indices[0].addresses,
                weight_addresses=table[0].addresses,
            )
            self.reference.push_flat_metadata(
                ids,
                weights,
                routes,
                expert_rank=self.expert_rank,
                expert_local=self.expert_local,
                idx_addresses=indices[1].addresses,
                weight_addresses=table[1].addresses,
            )
            wrong = sum(wrong_bits(got.bytes, want.bytes) for got, want in (indices, table))
            yield "push_flat_metadata", name, wrong
            back = self.kernels.pull_flat_values(there[0], there[1], there[2], table[0].addresses, dtype=dtype)
            yield "pull_flat_values", name, wrong_bits(back, weights.masked_fill(ids < 0, 0.0))

    def dots(self) -> Iterator[tuple[str, str, int]]:
        for dtype in _SUMMABLE:
            for shape in ((0, 4), (5, self.size.columns[0]), (6, self.size.columns[-1])):
                g, y = (self.random(shape, dtype, name) for name in ("g", "y"))
                weights = self.random((shape[0], 1), weights_dtype(dtype), "dots").flatten()
                got = self.kernels.scale_dot(*(tensor.to(self.device) for tensor in (g, y, weights)))
                want = self.reference.scale_dot(g, y, weights)
                yield "scale_dot", f"{dtype} {shape}", sum(map(wrong_bits, got, want))


def check(kernels: RowKernels, context: Context) -> Iterator[tuple[str, str, int]]:
    """Kernel, case and wrong elements, for every method of `RowKernels`."""
    return _Check(kernels, context).run()


def check_push(
    name: str, push: Callable[[Tensor, Tensor, list[int]], None], context: Context
) -> Iterator[tuple[str, str, int]]:
    """The same for another implementation of `push_rows`, without weights."""
    return _Check(kernels_for("reference"), context).pushes(name, push)
