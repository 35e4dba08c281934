"""The experts by our own grouped GEMM: two products forward, four backward, the activation fused into them.

N rows, S source rows, H hidden, I intermediate, E experts. Forward keeps gate and up `[N, 2I]`; the activation is made
again where the weight gradient needs it. Nothing between the products is cleared: what no expert owns is never read.
"""

from __future__ import annotations

from typing import Any, final

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from moecomm.kernels.experts import ExpertRows
from moecomm.kernels.flat_rows import expand_rows
from moecomm.kernels.triton.gathered_rows import sum_gathered_rows, sum_routed_rows
from moecomm.kernels.triton.grouped_gemm import compute_dtype, grouped_gemm_weight_gradient, multiply_rows
from moecomm.kernels.triton.segments import Segments
from moecomm.kernels.triton.tile_shapes import source_hash

__all__ = ["TritonExpertKernels", "grouped_swiglu"]


def grouped_swiglu(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    segments: Segments,
    row_idx: Tensor | None = None,
    row_weights: Tensor | None = None,
    clears_padding: bool = True,
) -> Tensor:
    """y[n] = row_weights[n] * expert(x[n]). Differentiable (once) in `x`, the weights of experts and of rows.

    Arguments:
        x: `[N, H]` bf16, fp16 or fp32; `[S, H]` with `row_idx`.
        gate_up_proj: `[E, 2I, H]`.
        down_proj: `[E, H, I]`.
        segments: whose rows are whose.
        row_idx: `[N]` int32 or int64, row of `x` that row n takes; -1 = a row of zeros. The gradient of a row of `x` is
            a sum over all n that took it, in ascending order.
        row_weights: `[N]` fp32; None = 1.
        clears_padding: make rows that are padding or nobody's zero. A large slab with few real rows costs less if they
            are left undefined; gradients with respect to `x` are zero there in any case.

    Returns:
        `[N, H]`, dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    return _GroupedSwiglu.apply(x, gate_up_proj, down_proj, segments, row_idx, row_weights, clears_padding)  # type: ignore[no-any-return, no-untyped-call]


@final
class TritonExpertKernels:
    """`ExpertKernels` in Triton, for CUDA tensors; for CPU tensors where Triton interprets."""

    @property
    def version(self) -> str:
        return f"triton {triton.__version__} {source_hash()}"

    def refusal(self, x: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> str | None:
        try:
            compute_dtype(x, gate_up_proj, down_proj)
        except ValueError as error:
            return str(error)
        return None

    def outputs(
        self,
        x: Tensor,
        rows: ExpertRows,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        *,
        out: Tensor | None,
        keeps_hidden: bool,
    ) -> tuple[Tensor, Tensor | None]:
        gathered = rows.gathered
        y = out
        if y is None or gathered is not None:
            y = torch.empty(rows.num_rows, x.shape[1], dtype=x.dtype, device=x.device)
        clears = out is None and gathered is None
        hidden = x.new_empty(rows.num_rows, gate_up_proj.shape[1]) if keeps_hidden else None
        _fill_outputs(
            x,
            gate_up_proj,
            down_proj,
            _segments_of(rows),
            y=y,
            hidden=hidden,
            row_idx=None if gathered is None else gathered.row_idx,
            row_weights=rows.row_weights,
            clears_padding=clears,
            clears_tail=clears,
        )
        return y if gathered is None else sum_routed_rows(y, gathered.routes, out=out), hidden

    def gradients(
        self,
        grad_y: Tensor,
        x: Tensor,
        rows: ExpertRows,
        gate_up_proj: Tensor,
        *,
        down_proj: Tensor,
        hidden: Tensor,
        needs: tuple[bool, bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        gathered, weights = rows.gathered, rows.row_weights
        *others, grad_weights = _gradients(
            # The weight gradient gathers on one side only, which is that of x.
            grad_y if gathered is None else expand_rows(grad_y, gathered),
            x,
            gate_up_proj,
            down_proj,
            _segments_of(rows),
            hidden=hidden,
            needs=needs,
            row_idx=None if gathered is None else gathered.row_idx,
            row_weights=weights,
            routes=None if gathered is None else gathered.routes,
        )
        if grad_weights is not None and weights is not None:
            grad_weights = grad_weights.to(weights.dtype)
        return others[0], others[1], others[2], grad_weights


def _segments_of(rows: ExpertRows) -> Segments:
    if rows.offsets is not None:
        return Segments.expert_major(rows.num_rows, rows.offsets)
    assert rows.num_tokens_per_expert is not None
    if rows.capacity == 0:
        return Segments.expert_major(0, rows.num_tokens_per_expert)  # all end at 0, whatever the counts
    return Segments.slab(rows.capacity, rows.num_tokens_per_expert)


def _fill_outputs(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    segments: Segments,
    *,
    y: Tensor,
    hidden: Tensor | None,
    row_idx: Tensor | None = None,
    row_weights: Tensor | None = None,
    clears_padding: bool = True,
    clears_tail: bool = True,
) -> None:
    """Fills `y` `[N, H]`, and `hidden` `[N, 2I]` unless None."""
    activation = torch.empty(segments.num_rows, down_proj.shape[2], dtype=x.dtype, device=x.device)
    multiply_rows(
        x,
        gate_up_proj.transpose(1, 2),
        segments,
        out=activation,
        epilogue="swiglu",
        hidden=hidden,
        row_idx=row_idx,
        row_weights=row_weights,
        clears_padding=False,
        clears_tail=False,
    )
    multiply_rows(
        activation, down_proj.transpose(1, 2), segments, out=y, clears_padding=clears_padding, clears_tail=clears_tail
    )


def _gradients(
    grad_y: Tensor,
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    segments: Segments,
    *,
    hidden: Tensor,
    needs: tuple[bool, bool, bool, bool],
    row_idx: Tensor | None = None,
    row_weights: Tensor | None = None,
    routes: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `x`, `gate_up_proj`, `down_proj` and `row_weights`; None where not needed.

    `routes`: as in `Gathered`, if they are known: then nothing has to be sorted.
    """
    compute = compute_dtype(x, gate_up_proj, down_proj)
    grad_x = grad_gate_up_proj = grad_down_proj = None
    grad_hidden = torch.empty_like(hidden)
    activation = hidden.new_empty(hidden.shape[0], down_proj.shape[2]) if needs[2] else None
    grad_row_weights = multiply_rows(
        grad_y,
        down_proj,
        segments,
        out=grad_hidden,
        epilogue="swiglu_backward",
        hidden=hidden,
        activation=activation,
        row_weights=row_weights,
        wants_weight_gradient=needs[3],
        clears_padding=False,
        clears_tail=False,
    )
    if activation is not None:
        grad_down_proj = torch.empty_like(down_proj, memory_format=torch.contiguous_format)
        grouped_gemm_weight_gradient(grad_y, activation, segments, out=grad_down_proj, compute=compute)
    if needs[1]:
        grad_gate_up_proj = torch.empty_like(gate_up_proj, memory_format=torch.contiguous_format)
        grouped_gemm_weight_gradient(grad_hidden, x, segments, out=grad_gate_up_proj, row_idx=row_idx, compute=compute)
    if needs[0]:
        grad_x = torch.empty(segments.num_rows, x.shape[1], dtype=x.dtype, device=x.device)
        clears = routes is None
        multiply_rows(grad_hidden, gate_up_proj, segments, out=grad_x, clears_padding=clears, clears_tail=clears)
        if routes is not None:
            grad_x = sum_routed_rows(grad_x, routes)
        elif row_idx is not None:
            grad_x = sum_gathered_rows(grad_x, row_idx, x.shape[0])
    return grad_x, grad_gate_up_proj, grad_down_proj, grad_row_weights


class _GroupedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        segments: Segments,
        row_idx: Tensor | None,
        row_weights: Tensor | None,
        clears_padding: bool,
    ) -> Tensor:
        y = torch.empty(segments.num_rows, x.shape[1], dtype=x.dtype, device=x.device)
        keeps_hidden = any(ctx.needs_input_grad)
        hidden = x.new_empty(segments.num_rows, gate_up_proj.shape[1]) if keeps_hidden else None
        _fill_outputs(
            x,
            gate_up_proj,
            down_proj,
            segments,
            y=y,
            hidden=hidden,
            row_idx=row_idx,
            row_weights=row_weights,
            clears_padding=clears_padding,
            clears_tail=clears_padding,
        )
        ctx.save_for_backward(x, gate_up_proj, down_proj, hidden, row_idx, row_weights)
        ctx.segments = segments
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up_proj, down_proj, hidden, row_idx, row_weights = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_x, grad_gate_up_proj, grad_down_proj, grad_row_weights = _gradients(
            grad_y.contiguous(),
            x,
            gate_up_proj,
            down_proj,
            ctx.segments,
            hidden=hidden,
            needs=(needs[0], needs[1], needs[2], needs[5]),
            row_idx=row_idx,
            row_weights=row_weights,
        )
        if grad_row_weights is not None:
            grad_row_weights = grad_row_weights.to(row_weights.dtype)
        return grad_x, grad_gate_up_proj, grad_down_proj, None, None, grad_row_weights, None
