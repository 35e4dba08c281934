"""Low-latency kernels of the CPU: integers to the native code. Shapes as in `moecomm.kernels.eager`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from moecomm import _C
from moecomm.kernels.eager import Form, Home, Overflow, Sorted

__all__ = ["CpuEagerKernels"]


@final
class CpuEagerKernels:
    """Native low-latency kernels; see `moecomm.kernels.eager.EagerKernels` for what each does."""

    def send_eager(
        self, rows: Tensor, topk_idx: Tensor, weights: Tensor | None, expert_rank: Tensor, windows: Sequence[int]
    ) -> tuple[Tensor, int]:
        num_tokens, num_topk = topk_idx.shape
        ids_out = torch.empty(num_tokens, num_topk, dtype=torch.int32)
        itemsize = rows.element_size()
        fingerprint = _C.send_eager(
            topk_idx.data_ptr(),
            topk_idx.dtype is torch.int64,
            num_tokens,
            num_topk,
            expert_rank.data_ptr(),
            expert_rank.numel(),
            rows.data_ptr(),
            rows.stride(0) * itemsize,
            rows.shape[1] * itemsize,
            0 if weights is None else weights.data_ptr(),
            0 if weights is None else weights.element_size(),
            windows,
            ids_out.data_ptr(),
        )
        return ids_out, fingerprint

    def receive_eager(
        self,
        home: Home,
        form: Form,
        windows: Sequence[int],
        num_tokens: Sequence[int],
        rows: int,
        values: int,
        used: Tensor,
    ) -> Sorted:
        rank, expert_rank, expert_local, tokens_per_expert, domain_experts, domain_sources = home
        num_experts, num_local = expert_rank.numel(), tokens_per_expert.numel()
        counts = torch.empty(len(windows), num_experts + len(windows), dtype=torch.int32)
        routes = torch.empty(num_tokens[rank], form.num_topk, dtype=torch.int64)
        tokens = torch.empty(num_local, dtype=torch.int32)
        offsets = None if form.capacity else torch.empty(num_local, dtype=torch.int32)
        index, need, room = _C.receive_eager(
            windows,
            num_tokens,
            expert_rank.data_ptr(),
            expert_local.data_ptr(),
            num_experts,
            rank,
            0 if domain_experts is None else domain_experts.data_ptr(),
            0 if domain_sources is None else domain_sources.data_ptr(),
            *form,
            rows,
            values,
            used.data_ptr(),
            counts.data_ptr(),
            routes.data_ptr(),
            tokens.data_ptr(),
            0 if offsets is None else offsets.data_ptr(),
            tokens_per_expert.data_ptr(),
        )
        if index >= 0:
            raise Overflow(index, need, room)
        return Sorted(counts, routes, tokens, offsets)

    def copy_expert_rows(
        self,
        out: int,
        rows: Tensor,
        row_bytes: int,
        counts: Tensor,
        local_experts: tuple[int, int],
        capacity: int,
        alignment: int,
    ) -> None:
        num_ranks, width = counts.shape
        first, end = local_experts
        _C.copy_expert_rows(
            out,
            rows.data_ptr(),
            row_bytes,
            counts.data_ptr(),
            num_ranks,
            width - num_ranks,
            first,
            end - first,
            capacity,
            alignment,
        )
