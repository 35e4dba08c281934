"""The contract of a set of row kernels: the same bits as the reference kernels, which are plain torch.

    T tokens   K top-k   E experts   R ranks   H columns   N rows at a rank

Checks take the kernels. Each works on memory of its own that is filled with poison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moecomm.kernels.base import ROW_BITS, RowKernels, weights_dtype
from moecomm.kernels.registry import kernels_for
from moecomm.placement import Placement
from moecomm.testing.compare import assert_bitwise_equal, expect
from moecomm.testing.contracts.cases import random_rows
from moecomm.testing.routing import masked, with_duplicates

__all__ = ["CHECKS"]

_SUMMABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CARRIED = (*_SUMMABLE, torch.uint8, torch.float8_e4m3fn)
_NUM_EXPERTS, _NUM_RANKS = 11, 3
_PLACEMENT = Placement(_NUM_EXPERTS, _NUM_RANKS)


@dataclass
class Memory:
    """Rows at every rank, `[R][N, H]`, poisoned."""

    num_rows: int
    columns: int
    dtype: torch.dtype
    parts: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        nbytes = self.num_rows * self.columns * self.dtype.itemsize
        self.parts = [torch.full((nbytes,), 0xA5, dtype=torch.uint8) for _ in range(_NUM_RANKS)]

    @property
    def addresses(self) -> list[int]:
        return [part.data_ptr() for part in self.parts]

    @property
    def bytes(self) -> Tensor:
        return torch.cat(self.parts)


def _routings() -> Iterator[tuple[str, Tensor]]:
    for num_tokens, num_topk in ((0, 2), (1, 1), (13, 4), (5, 40)):
        yield f"T={num_tokens}, K={num_topk}, masked", masked(num_tokens, _NUM_EXPERTS, num_topk, seed=num_tokens)
        yield f"T={num_tokens}, K={num_topk}, duplicates", with_duplicates(num_tokens, _NUM_EXPERTS, num_topk).int()
    yield "columns of another tensor", masked(4, _NUM_EXPERTS, 9, seed=1).t()


def _planned(kernels: RowKernels, layout: str, topk_idx: Tensor) -> Tensor:
    """Routes of a rank whose rows start where another rank's would end."""
    if layout == "flat":
        return kernels.plan_flat(topk_idx, _PLACEMENT.expert_rank, torch.tensor([3, 0, 1]))
    size = topk_idx.numel() + 1
    return kernels.plan_expert_major(
        topk_idx, _PLACEMENT.expert_rank, torch.arange(_NUM_EXPERTS, dtype=torch.int64) * size
    )


def _cases() -> Iterator[tuple[str, Tensor, Tensor, int]]:
    """Name, topk_idx, routes and a number of rows that is enough."""
    for name, topk_idx in _routings():
        for layout in ("expert_major", "flat"):
            routes = _planned(kernels_for("reference"), layout, topk_idx)
            rows = routes[routes >= 0] & ((1 << ROW_BITS) - 1)
            yield f"{name}, {layout}", topk_idx, routes, int(rows.max()) + 1 if rows.numel() else 1


def check_counts(kernels: RowKernels) -> None:
    """Routes per expert, tokens per rank, and a fingerprint of the values."""
    for name, topk_idx in _routings():
        counts = torch.full((2, _NUM_EXPERTS + _NUM_RANKS), -7, dtype=torch.int32)
        args = (_PLACEMENT.expert_rank, _NUM_RANKS)
        print_of_ids = kernels.count_routes(topk_idx, *args, counts[0])
        kernels_for("reference").count_routes(topk_idx, *args, counts[1])
        assert_bitwise_equal(counts[0], counts[1], f"count_routes, {name}")
        again = kernels.count_routes(topk_idx.long().contiguous(), *args, counts[0])
        expect(print_of_ids == again, f"count_routes, {name}: the fingerprint depends on dtype or strides")
        if len(set(topk_idx.flatten().tolist())) > 1:
            turned = kernels.count_routes(topk_idx.flip(0, 1).contiguous(), *args, counts[0])
            expect(print_of_ids != turned, f"count_routes, {name}: the fingerprint does not see the order")


def check_bad_ids_are_named(kernels: RowKernels) -> None:
    """An id beyond the experts or below -1 raises ValueError with its place and value."""
    counts = torch.zeros(_NUM_EXPERTS + _NUM_RANKS, dtype=torch.int32)
    for bad in (_NUM_EXPERTS, -2):
        topk_idx = torch.zeros(5, 3, dtype=torch.int64)
        topk_idx[4, 1] = bad
        try:
            kernels.count_routes(topk_idx, _PLACEMENT.expert_rank, _NUM_RANKS, counts)
        except ValueError as error:
            expect(all(part in str(error) for part in ("4", "1", str(bad))), f"the message does not say where: {error}")
        else:
            raise AssertionError(f"the id {bad} was accepted")


def check_plans(kernels: RowKernels) -> None:
    """Routes in both layouts."""
    for name, topk_idx in _routings():
        for layout in ("expert_major", "flat"):
            expected = _planned(kernels_for("reference"), layout, topk_idx)
            assert_bitwise_equal(_planned(kernels, layout, topk_idx), expected, f"plan, {name}, {layout}")


def check_pushed_rows(kernels: RowKernels) -> None:
    """Rows of every dtype and width arrive where the routes say, scaled or not; nothing else is written."""
    for name, _, routes, num_rows in _cases():
        for dtype in _CARRIED:
            for columns in (1, 7, 130):
                rows = random_rows((routes.shape[0], columns + 3), dtype, name)[:, :columns]
                weights = random_rows(tuple(routes.shape), weights_dtype(dtype), "weights")
                weights.masked_fill_(routes < 0, torch.nan)
                for scale in (None, weights) if dtype in _SUMMABLE else (None,):
                    got, want = (Memory(num_rows, columns, dtype) for _ in range(2))
                    kernels.push_rows(rows, routes, got.addresses, weights=scale)
                    kernels_for("reference").push_rows(rows, routes, want.addresses, weights=scale)
                    assert_bitwise_equal(got.bytes, want.bytes, f"push_rows, {name}, {dtype} x {columns}")


def check_combined_rows(kernels: RowKernels) -> None:
    """Sums in ascending p, rounded once, with and without weights; zeros where a token has no route."""
    for name, _, routes, num_rows in _cases():
        for dtype in _SUMMABLE:
            for columns in (1, 7, 130):
                memory = Memory(num_rows, columns, dtype)
                for rank, part in enumerate(memory.parts):
                    part.copy_(random_rows((num_rows, columns), dtype, f"{name} {rank}").view(torch.uint8).reshape(-1))
                weights = random_rows(tuple(routes.shape), weights_dtype(dtype), "weights")
                weights.masked_fill_(routes < 0, torch.nan)
                for scale in (None, weights):
                    got, want = (torch.full((routes.shape[0], columns), 3.0, dtype=dtype) for _ in range(2))
                    kernels.combine_rows(got, routes, memory.addresses, weights=scale)
                    kernels_for("reference").combine_rows(want, routes, memory.addresses, weights=scale)
                    assert_bitwise_equal(got, want, f"combine_rows, {name}, {dtype} x {columns}")


def check_values(kernels: RowKernels) -> None:
    """One number per route, there and back."""
    for name, _, routes, num_rows in _cases():
        for dtype in (torch.float32, torch.float64):
            values = random_rows(tuple(routes.shape), dtype, name)
            got, want = (Memory(num_rows, 1, dtype) for _ in range(2))
            kernels.push_values(values, routes, got.addresses)
            kernels_for("reference").push_values(values, routes, want.addresses)
            assert_bitwise_equal(got.bytes, want.bytes, f"push_values, {name}, {dtype}")
            back = kernels.pull_values(routes, want.addresses, dtype=dtype)
            assert_bitwise_equal(back, values.masked_fill(routes < 0, 0.0), f"pull_values, {name}, {dtype}")


def check_flat_metadata(kernels: RowKernels) -> None:
    """Local ids and weights of flat rows, and values fetched from such rows."""
    experts = (_PLACEMENT.expert_rank, _PLACEMENT.expert_local)
    for name, topk_idx in _routings():
        routes = _planned(kernels_for("reference"), "flat", topk_idx)
        num_rows, num_topk = topk_idx.shape[0] + 3, topk_idx.shape[1]
        for dtype in (torch.float32, torch.float64):
            weights = random_rows(tuple(topk_idx.shape), dtype, name)
            ids = [Memory(num_rows, num_topk, torch.int32) for _ in range(2)]
            table = [Memory(num_rows, num_topk, dtype) for _ in range(2)]
            for one, idx, weight in zip((kernels, kernels_for("reference")), ids, table, strict=True):
                one.push_flat_metadata(topk_idx, weights, routes, *experts, idx.addresses, weight.addresses)
            assert_bitwise_equal(ids[0].bytes, ids[1].bytes, f"push_flat_metadata, {name}: ids")
            assert_bitwise_equal(table[0].bytes, table[1].bytes, f"push_flat_metadata, {name}: weights, {dtype}")
            back = kernels.pull_flat_values(topk_idx, routes, _PLACEMENT.expert_rank, table[1].addresses, dtype=dtype)
            assert_bitwise_equal(back, weights.masked_fill(topk_idx < 0, 0.0), f"pull_flat_values, {name}, {dtype}")


def check_scale_dot(kernels: RowKernels) -> None:
    """Scaled gradients and dot products, in the stated order of summation."""
    for dtype in _SUMMABLE:
        for num_rows, columns in ((0, 4), (1, 1), (6, 31), (5, 32), (3, 1000)):
            g, y = (random_rows((num_rows, columns), dtype, name) for name in ("g", "y"))
            weights = random_rows((num_rows, 1), weights_dtype(dtype), "weights")[:, 0].contiguous()
            got, want = (one.scale_dot(g, y, weights) for one in (kernels, kernels_for("reference")))
            for name, a, b in zip(("scaled", "dots"), got, want, strict=True):
                assert_bitwise_equal(a, b, f"scale_dot, {dtype} {num_rows} x {columns}: {name}")


CHECKS: tuple[Callable[[RowKernels], None], ...] = (
    check_counts,
    check_bad_ids_are_named,
    check_plans,
    check_pushed_rows,
    check_combined_rows,
    check_values,
    check_flat_metadata,
    check_scale_dot,
)
