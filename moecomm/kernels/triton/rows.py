"""Row kernels in Triton: check the arguments, then launch. Shapes as in `moecomm.kernels.base`."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from moecomm.kernels.base import weights_dtype
from moecomm.kernels.checks import check_floating, check_matrix, check_tensor, format_number
from moecomm.kernels.triton import combine, push
from moecomm.kernels.triton.runtime import Addresses, check_device

__all__ = ["TritonRowKernels"]


@final
class TritonRowKernels:
    """Row kernels for CUDA tensors, and for CPU tensors where Triton interprets; see `moecomm.kernels.RowKernels`.

    `addresses` may be a tensor, as `moecomm.kernels.triton.runtime.Addresses` says. Numbers begin at multiples of their
    size: a GPU cannot load others. On a GPU only `count_routes` waits for it; what the others could refuse after
    looking at ids or routes, they trust.
    """

    def push_rows(self, rows: Tensor, routes: Tensor, addresses: Addresses, *, weights: Tensor | None = None) -> None:
        device = check_device("routes", routes)
        check_matrix("routes", routes, torch.int64, device)
        num_tokens, num_slots = routes.shape
        if rows.dim() != 2 or rows.shape[0] != num_tokens or rows.device != device:
            raise ValueError(
                f"rows is {list(rows.shape)} on {rows.device}; wanted [{num_tokens}, H] on {device} like routes"
            )
        if rows.stride(1) != 1 and rows.shape[1] > 1 and num_tokens > 0:
            raise ValueError(f"rows has strides {rows.stride()}; the last one must be 1")
        if weights is None:
            push.push_rows(rows, routes, addresses)
            return
        format_number("rows", rows.dtype)
        check_tensor("weights", weights, weights_dtype(rows.dtype), (num_tokens, num_slots), device)
        push.push_weighted_rows(rows, routes, addresses, weights)

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
