"""Row kernels of the CPU: check the arguments, then hand integers to the native code.

Shapes as in `moecomm.kernels.base`. The native code picks the widest instruction set of the machine at run time; all of
them give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from moecomm import _C
from moecomm.kernels.base import weights_dtype
from moecomm.kernels.checks import (
    check_floating,
    check_ids,
    check_matrix,
    check_tensor,
    check_values,
    format_number,
    value_bytes,
)

__all__ = ["CpuRowKernels"]


@final
class CpuRowKernels:
    """Native row kernels; see `moecomm.kernels.RowKernels` for what each does."""

    def count_routes(self, topk_idx: Tensor, expert_rank: Tensor, num_ranks: int, counts: Tensor) -> int:
        ids = check_ids("topk_idx", topk_idx)
        num_tokens, num_topk = ids.shape
        num_experts = expert_rank.numel()
        check_tensor("expert_rank", expert_rank, torch.int32, (num_experts,))
        check_tensor("counts", counts, torch.int32, (num_experts + num_ranks,))
        is_int64 = ids.dtype is torch.int64
        return _C.count_routes(
            ids.data_ptr(),
            is_int64,
            num_tokens,
            num_topk,
            expert_rank.data_ptr(),
            num_experts,
            num_ranks,
            counts.data_ptr(),
        )

    def plan_expert_major(self, topk_idx: Tensor, expert_rank: Tensor, bases: Tensor) -> Tensor:
        ids = check_ids("topk_idx", topk_idx)
        num_tokens, num_topk = ids.shape
        num_experts = expert_rank.numel()
        check_tensor("expert_rank", expert_rank, torch.int32, (num_experts,))
        check_tensor("bases", bases, torch.int64, (num_experts,))
        routes = torch.empty(num_tokens, num_topk, dtype=torch.int64)
        is_int64 = ids.dtype is torch.int64
        _C.plan_expert_major(
            ids.data_ptr(),
            is_int64,
            num_tokens,
            num_topk,
            expert_rank.data_ptr(),
            num_experts,
            bases.data_ptr(),
            routes.data_ptr(),
        )
        return routes

    def plan_flat(self, topk_idx: Tensor, expert_rank: Tensor, bases: Tensor) -> Tensor:
        ids = check_ids("topk_idx", topk_idx)
        num_tokens, num_topk = ids.shape
        num_experts = expert_rank.numel()
        num_ranks = bases.numel()
        check_tensor("expert_rank", expert_rank, torch.int32, (num_experts,))
        check_tensor("bases", bases, torch.int64, (num_ranks,))
        routes = torch.empty(num_tokens, num_topk, dtype=torch.int64)
        is_int64 = ids.dtype is torch.int64
        _C.plan_flat(
            ids.data_ptr(),
            is_int64,
            num_tokens,
            num_topk,
            expert_rank.data_ptr(),
            num_experts,
            num_ranks,
            bases.data_ptr(),
            routes.data_ptr(),
        )
        return routes

    def push_rows(
        self, rows: Tensor, routes: Tensor, addresses: Sequence[int], *, weights: Tensor | None = None
    ) -> None:
        check_matrix("routes", routes, torch.int64)
        num_tokens, num_slots = routes.shape
        if rows.dim() != 2 or rows.shape[0] != num_tokens or not rows.is_cpu:
            raise ValueError(
                f"rows is {list(rows.shape)} on {rows.device}; wanted [{num_tokens}, H] on cpu like routes"
            )
        hidden = rows.shape[1]
        row_stride, column_stride = rows.stride()
        if column_stride != 1 and hidden > 1 and num_tokens > 0:
            raise ValueError(f"rows has strides {rows.stride()}; the last one must be 1")
        itemsize = rows.element_size()
        if weights is None:
            _C.push_rows(
                rows.data_ptr(),
                row_stride * itemsize,
                num_tokens,
                hidden * itemsize,
                routes.data_ptr(),
                num_slots,
                addresses,
            )
            return
        number = format_number("rows", rows.dtype)
        check_tensor("weights", weights, weights_dtype(rows.dtype), (num_tokens, num_slots))
        _C.push_weighted_rows(
            rows.data_ptr(),
            row_stride * itemsize,
            num_tokens,
            hidden * itemsize,
            number,
            routes.data_ptr(),
            num_slots,
            addresses,
            weights.data_ptr(),
        )

    def push_values(self, values: Tensor, routes: Tensor, addresses: Sequence[int]) -> None:
        check_matrix("routes", routes, torch.int64)
        num_tokens, num_slots = routes.shape
        num_bytes = check_values("values", values, (num_tokens, num_slots))
        _C.push_values(values.data_ptr(), num_bytes, routes.data_ptr(), num_tokens, num_slots, addresses)

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
        ids = check_ids("topk_idx", topk_idx)
        num_tokens, num_topk = ids.shape
        num_experts = expert_rank.numel()
        check_matrix("routes", routes, torch.int64)
        if routes.shape[0] != num_tokens:
            raise ValueError(f"routes has {routes.shape[0]} rows; topk_idx has {num_tokens}")
        check_tensor("expert_rank", expert_rank, torch.int32, (num_experts,))
        check_tensor("expert_local", expert_local, torch.int32, (num_experts,))
        if (topk_weights is None) != (weight_addresses is None):
            raise ValueError("topk_weights and weight_addresses must be given together or both be None")
        weights_address, num_bytes = 0, 0
        if topk_weights is not None:
            num_bytes = check_values("topk_weights", topk_weights, (num_tokens, num_topk))
            weights_address = topk_weights.data_ptr()
        is_int64 = ids.dtype is torch.int64
        _C.push_flat_metadata(
            ids.data_ptr(),
            is_int64,
            num_tokens,
            num_topk,
            expert_rank.data_ptr(),
            expert_local.data_ptr(),
            num_experts,
            weights_address,
            num_bytes,
            routes.data_ptr(),
            routes.shape[1],
            idx_addresses,
            weight_addresses or (),
        )

    def combine_rows(
        self, out: Tensor, routes: Tensor, addresses: Sequence[int], *, weights: Tensor | None = None
    ) -> None:
        number = check_floating("out", out)
        check_matrix("routes", routes, torch.int64)
        num_tokens, num_slots = routes.shape
        num_rows, hidden = out.shape
        if num_rows != num_tokens:
            raise ValueError(f"out has {num_rows} rows; routes has {num_tokens}")
        weights_address = 0
        if weights is not None:
            check_tensor("weights", weights, weights_dtype(out.dtype), (num_tokens, num_slots))
            weights_address = weights.data_ptr()
        _C.combine_rows(
            out.data_ptr(), num_tokens, hidden, number, routes.data_ptr(), num_slots, addresses, weights_address
        )

    def pull_values(self, routes: Tensor, addresses: Sequence[int], *, dtype: torch.dtype = torch.float32) -> Tensor:
        check_matrix("routes", routes, torch.int64)
        num_tokens, num_slots = routes.shape
        num_bytes = value_bytes("dtype", dtype)
        out = torch.empty(num_tokens, num_slots, dtype=dtype)
        _C.pull_values(out.data_ptr(), num_bytes, routes.data_ptr(), num_tokens, num_slots, addresses)
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
        num_tokens, num_topk = ids.shape
        num_experts = expert_rank.numel()
        check_matrix("routes", routes, torch.int64)
        if routes.shape[0] != num_tokens:
            raise ValueError(f"routes has {routes.shape[0]} rows; topk_idx has {num_tokens}")
        check_tensor("expert_rank", expert_rank, torch.int32, (num_experts,))
        num_bytes = value_bytes("dtype", dtype)
        out = torch.empty(num_tokens, num_topk, dtype=dtype)
        is_int64 = ids.dtype is torch.int64
        _C.pull_flat_values(
            out.data_ptr(),
            num_bytes,
            ids.data_ptr(),
            is_int64,
            num_tokens,
            num_topk,
            expert_rank.data_ptr(),
            num_experts,
            routes.data_ptr(),
            routes.shape[1],
            addresses,
        )
        return out

    def scale_dot(self, g: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        number = check_floating("g", g)
        num_rows, hidden = g.shape
        check_tensor("y", y, g.dtype, (num_rows, hidden))
        check_tensor("weights", weights, weights_dtype(g.dtype), (num_rows,))
        scaled = torch.empty_like(g)
        dots = torch.empty_like(weights)
        _C.scale_dot(
            scaled.data_ptr(),
            dots.data_ptr(),
            g.data_ptr(),
            y.data_ptr(),
            weights.data_ptr(),
            num_rows,
            hidden,
            number,
        )
        return scaled, dots
