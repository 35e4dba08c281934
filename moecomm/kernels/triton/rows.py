"""Row kernels in Triton: check the arguments, then launch. Shapes as in `moecomm.kernels.base`."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

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
from moecomm.kernels.summary import HEAD
from moecomm.kernels.triton import combine, flat, gradients, plans, push, values
from moecomm.kernels.triton.counts import count_by_expert, count_by_rank
from moecomm.kernels.triton.fingerprint import checked_fingerprint, summarize_ids
from moecomm.kernels.triton.runtime import Addresses, check_device
from moecomm.kernels.triton.signals import check_status

__all__ = ["TritonRowKernels"]


@final
class TritonRowKernels:
    """Row kernels for CUDA tensors, and for CPU tensors where Triton interprets; see `moecomm.kernels.RowKernels`.

    `addresses` may be a tensor, as `moecomm.kernels.triton.runtime.Addresses` says. Numbers begin at multiples of their
    size: a GPU cannot load others. On a GPU only `count_routes` waits for it; what the others could refuse after
    looking at ids or routes, they trust.

    What writes to other ranks takes a `status`, as `moecomm.kernels.triton.signals.wait` does: once a wait of an
    earlier kernel of the stream has failed, nothing is written, for nobody can know whose memory it would be.
    """

    def count_routes(self, topk_idx: Tensor, expert_rank: Tensor, num_ranks: int, counts: Tensor) -> int:
        device = check_device("topk_idx", topk_idx)
        ids = check_ids("topk_idx", topk_idx, device)
        num_experts = expert_rank.numel()
        check_tensor("expert_rank", expert_rank, torch.int32, (num_experts,), device)
        check_tensor("counts", counts, torch.int32, (num_experts + num_ranks,), device)
        count_by_expert(ids, num_experts, counts[:num_experts])
        count_by_rank(ids, expert_rank, num_ranks, counts[num_experts:])
        return checked_fingerprint(ids, expert_rank, num_ranks)

    def summarize_routes(self, topk_idx: Tensor, expert_rank: Tensor, num_ranks: int, summary: Tensor) -> None:
        device = check_device("topk_idx", topk_idx)
        ids = check_ids("topk_idx", topk_idx, device)
        num_experts = expert_rank.numel()
        check_tensor("expert_rank", expert_rank, torch.int32, (num_experts,), device)
        check_tensor("summary", summary, torch.int64, (HEAD + num_experts + num_ranks,), device)
        behind = HEAD + num_experts
        summary[HEAD:behind].copy_(count_by_expert(ids, num_experts).totals)
        summary[behind:].copy_(count_by_rank(ids, expert_rank, num_ranks).totals)
        summarize_ids(ids, num_experts, summary[:HEAD])

    def count_tokens(self, topk_idx: Tensor, expert_group: Tensor, num_groups: int, totals: Tensor) -> None:
        device = check_device("topk_idx", topk_idx)
        ids = check_ids("topk_idx", topk_idx, device)
        check_tensor("expert_group", expert_group, torch.int32, (expert_group.numel(),), device)
        check_tensor("totals", totals, torch.int64, (num_groups,), device)
        totals.copy_(count_by_rank(ids, expert_group, num_groups).totals)

    def plan_expert_major(self, topk_idx: Tensor, expert_rank: Tensor, bases: Tensor) -> Tensor:
        device = check_device("topk_idx", topk_idx)
        ids = check_ids("topk_idx", topk_idx, device)
        num_experts = expert_rank.numel()
        check_tensor("expert_rank", expert_rank, torch.int32, (num_experts,), device)
        check_tensor("bases", bases, torch.int64, (num_experts,), device)
        return plans.plan_by_expert(ids, expert_rank, bases)

    def plan_flat(self, topk_idx: Tensor, expert_rank: Tensor, bases: Tensor) -> Tensor:
        device = check_device("topk_idx", topk_idx)
        ids = check_ids("topk_idx", topk_idx, device)
        check_tensor("expert_rank", expert_rank, torch.int32, (expert_rank.numel(),), device)
        check_tensor("bases", bases, torch.int64, (bases.numel(),), device)
        return plans.plan_by_rank(ids, expert_rank, bases)

    def push_rows(
        self,
        rows: Tensor,
        routes: Tensor,
        addresses: Addresses,
        *,
        weights: Tensor | None = None,
        status: Tensor | None = None,
    ) -> None:
        device = check_device("routes", routes)
        check_status(status, device)
        check_matrix("routes", routes, torch.int64, device)
        num_tokens, num_slots = routes.shape
        if rows.dim() != 2 or rows.shape[0] != num_tokens or rows.device != device:
            raise ValueError(
                f"rows is {list(rows.shape)} on {rows.device}; wanted [{num_tokens}, H] on {device} like routes"
            )
        if rows.stride(1) != 1 and rows.shape[1] > 1 and num_tokens > 0:
            raise ValueError(f"rows has strides {rows.stride()}; the last one must be 1")
        if weights is None:
            push.push_rows(rows, routes, addresses, status)
            return
        format_number("rows", rows.dtype)
        check_tensor("weights", weights, weights_dtype(rows.dtype), (num_tokens, num_slots), device)
        push.push_weighted_rows(rows, routes, addresses, weights, status)

    def push_values(
        self, values: Tensor, routes: Tensor, addresses: Addresses, *, status: Tensor | None = None
    ) -> None:
        device = check_device("routes", routes)
        check_status(status, device)
        check_matrix("routes", routes, torch.int64, device)
        check_values("values", values, tuple(routes.shape), device)
        push.push_rows(values.view(-1, 1), routes.view(-1, 1), addresses, status)

    def push_flat_metadata(
        self,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        routes: Tensor,
        expert_rank: Tensor,
        expert_local: Tensor,
        idx_addresses: Addresses,
        weight_addresses: Addresses | None,
        *,
        status: Tensor | None = None,
    ) -> None:
        ids = self._flat_ids(topk_idx, routes, expert_rank)
        check_status(status, ids.device)
        check_tensor("expert_local", expert_local, torch.int32, tuple(expert_rank.shape), ids.device)
        if (topk_weights is None) != (weight_addresses is None):
            raise ValueError("topk_weights and weight_addresses must be given together or both be None")
        if topk_weights is not None:
            check_values("topk_weights", topk_weights, tuple(ids.shape), ids.device)
        flat.push_flat_metadata(
            ids, topk_weights, routes, expert_rank, expert_local, idx_addresses, weight_addresses, status
        )

    def combine_rows(self, out: Tensor, routes: Tensor, addresses: Addresses, *, weights: Tensor | None = None) -> None:
        device = check_device("out", out)
        check_floating("out", out, device)
        check_matrix("routes", routes, torch.int64, device)
        num_rows, num_tokens = out.shape[0], routes.shape[0]
        if num_rows != num_tokens:
            raise ValueError(f"out has {num_rows} rows; routes has {num_tokens}")
        if weights is not None:
            check_tensor("weights", weights, weights_dtype(out.dtype), tuple(routes.shape), device)
        combine.combine_rows(out, routes, addresses, weights)

    def pull_values(self, routes: Tensor, addresses: Addresses, *, dtype: torch.dtype = torch.float32) -> Tensor:
        device = check_device("routes", routes)
        check_matrix("routes", routes, torch.int64, device)
        value_bytes("dtype", dtype)
        return values.pull_values(routes, addresses, dtype)

    def pull_flat_values(
        self,
        topk_idx: Tensor,
        routes: Tensor,
        expert_rank: Tensor,
        addresses: Addresses,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        ids = self._flat_ids(topk_idx, routes, expert_rank)
        value_bytes("dtype", dtype)
        return flat.pull_flat_values(ids, routes, expert_rank, addresses, dtype)

    def scale_dot(self, g: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        device = check_device("g", g)
        check_floating("g", g, device)
        check_tensor("y", y, g.dtype, tuple(g.shape), device)
        check_tensor("weights", weights, weights_dtype(g.dtype), (g.shape[0],), device)
        return gradients.scale_dot(g, y, weights)

    @staticmethod
    def _flat_ids(topk_idx: Tensor, routes: Tensor, expert_rank: Tensor) -> Tensor:
        device = check_device("topk_idx", topk_idx)
        ids = check_ids("topk_idx", topk_idx, device)
        check_matrix("routes", routes, torch.int64, device)
        if routes.shape[0] != ids.shape[0]:
            raise ValueError(f"routes has {routes.shape[0]} rows; topk_idx has {ids.shape[0]}")
        check_tensor("expert_rank", expert_rank, torch.int32, (expert_rank.numel(),), device)
        return ids
