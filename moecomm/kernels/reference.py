"""Row kernels in plain torch over views of the addresses: slow, short, and what the others are compared with.

Shapes as in `moecomm.kernels.base`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from moecomm.kernels.base import NUM_DOT_LANES, make_route, rank_of, row_of, weights_dtype
from moecomm.kernels.checks import (
    check_floating,
    check_ids,
    check_matrix,
    check_tensor,
    check_values,
    format_number,
    value_bytes,
)

__all__ = ["ReferenceRowKernels"]

_MASK = (1 << 64) - 1


def _row_at(route: int, addresses: Sequence[int], row_bytes: int) -> Tensor:
    """A uint8 view of the row that a route names."""
    if row_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    address = addresses[rank_of(route)] + row_of(route) * row_bytes
    return torch.frombuffer((ctypes.c_uint8 * row_bytes).from_address(address), dtype=torch.uint8)


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in this dtype, with canonical NaN."""
    narrow = value.to(dtype)
    bits, nan = {
        torch.float64: (torch.int64, 0x7FF8000000000000),
        torch.float32: (torch.int32, 0x7FC00000),
        torch.bfloat16: (torch.int16, 0x7FC0),
        torch.float16: (torch.int16, 0x7E00),
    }[dtype]
    return torch.where(value.isnan(), torch.tensor(nan, dtype=bits), narrow.view(bits)).view(dtype)


def _mix(value: int, position: int) -> int:
    x = (value + 0x9E3779B97F4A7C15) * (2 * position + 0xBF58476D1CE4E5B9) & _MASK
    x ^= x >> 32
    x = x * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 29)


@final
class ReferenceRowKernels:
    """Reference row kernels; see `moecomm.kernels.RowKernels` for what each does."""

    def count_routes(self, topk_idx: Tensor, expert_rank: Tensor, num_ranks: int, counts: Tensor) -> int:
        ids = check_ids("topk_idx", topk_idx)
        num_experts = expert_rank.numel()
        check_tensor("expert_rank", expert_rank, torch.int32, (num_experts,))
        check_tensor("counts", counts, torch.int32, (num_experts + num_ranks,))
        counts.zero_()
        rank_of_expert = expert_rank.tolist()
        fingerprint = 0
        for t, experts in enumerate(ids.tolist()):
            for k, expert in enumerate(experts):
                if not -1 <= expert < num_experts:
                    raise ValueError(
                        f"topk_idx[{t}, {k}] = {expert} is not an expert: valid ids are 0 to {num_experts - 1}, "
                        "or -1 for no expert"
                    )
                fingerprint += _mix(expert & _MASK, t * len(experts) + k)
                if expert >= 0:
                    counts[expert] += 1
            for rank in {rank_of_expert[expert] for expert in experts if expert >= 0}:
                counts[num_experts + rank] += 1
        return _mix(fingerprint & _MASK, _mix(*ids.shape)) >> 1

    def plan_expert_major(self, topk_idx: Tensor, expert_rank: Tensor, bases: Tensor) -> Tensor:
        ids = check_ids("topk_idx", topk_idx)
        check_tensor("bases", bases, torch.int64, (expert_rank.numel(),))
        following = bases.tolist()
        routes = torch.full(ids.shape, -1, dtype=torch.int64)
        for t, experts in enumerate(ids.tolist()):
            for k, expert in enumerate(experts):
                if expert >= 0:
                    routes[t, k] = make_route(int(expert_rank[expert]), following[expert])
                    following[expert] += 1
        return routes

    def plan_flat(self, topk_idx: Tensor, expert_rank: Tensor, bases: Tensor) -> Tensor:
        ids = check_ids("topk_idx", topk_idx)
        following = bases.tolist()
        routes = torch.full(ids.shape, -1, dtype=torch.int64)
        for t, experts in enumerate(ids.tolist()):
            for p, rank in enumerate(sorted({int(expert_rank[expert]) for expert in experts if expert >= 0})):
                routes[t, p] = make_route(rank, following[rank])
                following[rank] += 1
        return routes

    def push_rows(
        self, rows: Tensor, routes: Tensor, addresses: Sequence[int], *, weights: Tensor | None = None
    ) -> None:
        check_matrix("routes", routes, torch.int64)
        if weights is not None:
            format_number("rows", rows.dtype)
            check_tensor("weights", weights, weights_dtype(rows.dtype), tuple(routes.shape))
        for t, slots in enumerate(routes.tolist()):
            for p, route in enumerate(slots):
                if route < 0:
                    continue
                row = rows[t]
                if weights is not None:
                    row = _rounded(weights[t, p] * row.to(weights.dtype), rows.dtype)
                raw = row.contiguous().view(torch.uint8) if row.numel() else torch.empty(0, dtype=torch.uint8)
                _row_at(route, addresses, raw.numel()).copy_(raw)

    def push_values(self, values: Tensor, routes: Tensor, addresses: Sequence[int]) -> None:
        check_values("values", values, tuple(routes.shape))
        self.push_rows(values.reshape(-1, 1), routes.reshape(-1, 1), addresses)

    def push_flat_metadata(
        self,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        routes: Tensor,
        expert_rank: Tensor,
        expert_local: Tensor,
        idx_addresses: Sequence[int],
        weight_addresses: Sequence[int] | None,
    ) -> None:
        ids = check_ids("topk_idx", topk_idx).long()
        if topk_weights is not None:
            check_values("topk_weights", topk_weights, tuple(topk_idx.shape))
        for t, slots in enumerate(routes.tolist()):
            for route in slots:
                if route < 0:
                    continue
                chosen = ids[t].clamp(min=0)
                is_there = (ids[t] >= 0) & (expert_rank[chosen] == rank_of(route))
                local = torch.where(is_there, expert_local[chosen], -1)
                _row_at(route, idx_addresses, 4 * local.numel()).copy_(local.to(torch.int32).view(torch.uint8))
                if topk_weights is not None and weight_addresses is not None:
                    kept = torch.where(is_there, topk_weights[t], 0.0)
                    _row_at(route, weight_addresses, kept.nbytes).copy_(kept.view(torch.uint8))

    def combine_rows(
        self, out: Tensor, routes: Tensor, addresses: Sequence[int], *, weights: Tensor | None = None
    ) -> None:
        check_floating("out", out)
        wide = weights_dtype(out.dtype)
        if weights is not None:
            check_tensor("weights", weights, wide, tuple(routes.shape))
        row_bytes = out.shape[1] * out.element_size()
        for t, slots in enumerate(routes.tolist()):
            acc = torch.zeros(out.shape[1], dtype=wide)
            for p, route in enumerate(slots):
                if route < 0:
                    continue
                row = _row_at(route, addresses, row_bytes).view(out.dtype).to(wide)
                acc = acc + (row if weights is None else weights[t, p] * row)
            out[t] = _rounded(acc, out.dtype)

    def pull_values(self, routes: Tensor, addresses: Sequence[int], *, dtype: torch.dtype = torch.float32) -> Tensor:
        num_bytes = value_bytes("dtype", dtype)
        out = torch.zeros(routes.shape, dtype=dtype)
        for t, slots in enumerate(routes.tolist()):
            for p, route in enumerate(slots):
                if route >= 0:
                    out[t, p] = _row_at(route, addresses, num_bytes).view(dtype)[0]
        return out

    def pull_flat_values(
        self,
        topk_idx: Tensor,
        routes: Tensor,
        expert_rank: Tensor,
        addresses: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        ids = check_ids("topk_idx", topk_idx)
        row_bytes = value_bytes("dtype", dtype) * ids.shape[1]
        out = torch.zeros(ids.shape, dtype=dtype)
        for t, slots in enumerate(routes.tolist()):
            route_to = {rank_of(route): route for route in slots if route >= 0}
            for k, expert in enumerate(ids[t].tolist()):
                if expert >= 0:
                    row = _row_at(route_to[int(expert_rank[expert])], addresses, row_bytes)
                    out[t, k] = row.view(dtype)[k]
        return out

    def scale_dot(self, g: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        check_floating("g", g)
        check_tensor("y", y, g.dtype, tuple(g.shape))
        wide = weights_dtype(g.dtype)
        check_tensor("weights", weights, wide, (g.shape[0],))
        scaled = _rounded(weights[:, None] * g.to(wide), g.dtype)
        padding = -g.shape[1] % NUM_DOT_LANES
        products = torch.nn.functional.pad(g.to(wide) * y.to(wide), (0, padding))
        lanes = torch.zeros(g.shape[0], NUM_DOT_LANES, dtype=wide)
        for begin in range(0, products.shape[1], NUM_DOT_LANES):
            lanes = lanes + products[:, begin : begin + NUM_DOT_LANES]
        step = NUM_DOT_LANES // 2
        while step:
            lanes = lanes[:, :step] + lanes[:, step : 2 * step]
            step //= 2
        return scaled, _rounded(lanes[:, 0], wide)
