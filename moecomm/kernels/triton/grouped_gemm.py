"""Grouped GEMM: every row times the matrix of its expert, and the gradients of the matrices.

N rows, E experts, K inner size, M columns, S rows of a source that is gathered from. The host reads no value of the
device: the grid has as many programs as run at once, and each finds its tiles by the offsets it reads.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from moecomm.kernels.triton.descriptors import (
    describable,
    describable_rows,
    descriptors_of,
    descriptors_of_rows,
)
from moecomm.kernels.triton.grouped_gemm_rows import multiply_rows_kernel
from moecomm.kernels.triton.grouped_gemm_weights import weight_gradient_kernel
from moecomm.kernels.triton.runtime import check_device, launch
from moecomm.kernels.triton.segments import Segments
from moecomm.kernels.triton.tile_shapes import TileShape, choose_shape, num_programs

__all__ = ["compute_dtype", "grouped_gemm", "grouped_gemm_weight_gradient", "multiply_rows"]

_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def grouped_gemm(
    x: Tensor,
    weight: Tensor,
    segments: Segments,
    *,
    row_idx: Tensor | None = None,
    row_weights: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out[n] = row_weights[n] * (x[n] @ weight[e]) for every row n of expert e. No gradients: see `grouped_swiglu`.

    The data gradient is the same product with `weight.transpose(1, 2)`.

    Arguments:
        x: `[N, K]` bf16, fp16 or fp32; `[S, K]` with `row_idx`.
        weight: `[E, K, M]`, any strides; dtypes may differ, the product is made in the wider one.
        segments: whose rows are whose.
        row_idx: `[N]` int32 or int64, row of `x` that row n takes; -1 (or outside 0 .. S - 1) = a row of zeros.
        row_weights: `[N]` fp32, or None = 1.
        out: `[N, M]`, rows contiguous; None = new memory in the dtype of `x`.

    Returns:
        `[N, M]`. Rows that are padding or nobody's are zeros.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    if out is None:
        out = torch.empty(segments.num_rows, weight.shape[2], dtype=x.dtype, device=x.device)
    multiply_rows(x, weight, segments, out=out, row_idx=row_idx, row_weights=row_weights)
    return out


def grouped_gemm_weight_gradient(
    left: Tensor,
    right: Tensor,
    segments: Segments,
    *,
    out: Tensor,
    row_idx: Tensor | None = None,
    compute: torch.dtype | None = None,
) -> Tensor:
    """out[e] = left[rows of e].T @ right[rows of e], a sum in ascending order of rows; zeros if e has no rows.

    Arguments:
        left: `[N, M]` bf16, fp16 or fp32.
        right: `[N, K]`; `[S, K]` with `row_idx`.
        segments: whose rows are whose; padding is not read.
        out: `[E, M, K]`, any dtype, columns contiguous.
        row_idx: `[N]` int32 or int64, row of `right` that row n takes; -1 = a row of zeros.
        compute: dtype of the operands in the product; None = the wider of the two.

    Returns:
        `out`.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    num_left, num_right = left.shape[1], right.shape[1]
    _check_rows("left", left, segments.num_rows, None)
    _check_rows("right", right, segments.num_rows, row_idx)
    _check("out", out, (segments.num_experts, num_left, num_right))
    if out.stride(2) != 1 and num_right > 1:
        raise ValueError(f"out must have contiguous columns, got strides {list(out.stride())}")
    left, right = _with_contiguous_columns(left), _with_contiguous_columns(right)
    if out.numel() == 0:
        return out
    compute = compute or compute_dtype(left, right)

    def run(shape: TileShape) -> None:
        tiles = segments.num_experts * -(-num_left // shape.rows) * -(-num_right // shape.columns)
        launch(
            weight_gradient_kernel,
            num_programs(shape, tiles, out.device),
            out.device,
            left,
            right,
            out,
            *(descriptors_of_rows(left, right, shape) if shape.uses_descriptors else (None, None)),
            row_idx,
            segments.offsets,
            segments.num_tokens_per_expert,
            segments.num_experts,
            segments.num_rows,
            right.shape[0],
            segments.capacity,
            num_left,
            num_right,
            left.stride(0),
            right.stride(0),
            out.stride(0),
            out.stride(1),
            COMPUTE=_TYPES[compute],
            REST_STAGES=1 if shape.uses_descriptors else shape.num_stages,
            BLOCK_LEFT=shape.rows,
            BLOCK_RIGHT=shape.columns,
            BLOCK_ROWS=shape.inner,
            GROUP=shape.group,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )

    run(
        choose_shape(
            "weights",
            compute=compute,
            dtypes=(left.dtype, right.dtype, out.dtype),
            rows_per_expert=segments.rows_per_expert,
            sizes=(segments.num_experts, num_left, num_right, int(row_idx is not None), int(segments.capacity > 0)),
            device=out.device,
            allows_descriptors=row_idx is None and left.dtype == compute and describable_rows(left, right),
            launch=run,
        )
    )
    return out


def multiply_rows(
    x: Tensor,
    weight: Tensor,
    segments: Segments,
    *,
    out: Tensor,
    epilogue: str = "plain",
    hidden: Tensor | None = None,
    activation: Tensor | None = None,
    row_idx: Tensor | None = None,
    row_weights: Tensor | None = None,
    wants_weight_gradient: bool = False,
    clears_padding: bool = True,
    clears_tail: bool = True,
) -> Tensor | None:
    """The product with any epilogue of `multiply_rows_kernel`, into given memory.

    Arguments:
        x: `[N, K]`; `[S, K]` with `row_idx`.
        weight: `[E, K, M]`; "swiglu": `[E, K, 2M]`.
        out: `[N, M]`; "swiglu_backward": `[N, 2M]`.
        hidden: `[N, 2M]`: "swiglu" writes it unless None, "swiglu_backward" reads it.
        activation: `[N, M]`, "swiglu_backward" writes it unless None.
        wants_weight_gradient: "swiglu_backward": return the gradients of the rows' weights.
        clears_padding: make rows of an expert beyond its real ones zero, or leave them as they are.
        clears_tail: make rows beyond the last offset zero, or leave them as they are.

    Returns:
        `[N]` fp32 if `wants_weight_gradient`, zero for rows that are not real; otherwise None.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    num_experts, num_inner, num_columns = weight.shape
    if epilogue == "swiglu":
        num_columns //= 2
    _check("weight", weight, (segments.num_experts, x.shape[1], num_columns * (2 if epilogue == "swiglu" else 1)))
    _check_rows("x", x, segments.num_rows, row_idx)
    _check("out", out, (segments.num_rows, num_columns * (2 if epilogue == "swiglu_backward" else 1)))
    for name, tensor, width in (("hidden", hidden, 2 * num_columns), ("activation", activation, num_columns)):
        if tensor is not None:
            _check(name, tensor, (segments.num_rows, width))
    if row_weights is not None:
        _check("row_weights", row_weights, (segments.num_rows,))
        row_weights = row_weights.contiguous()
    for name, written in (("out", out), ("hidden", hidden), ("activation", activation)):
        if written is not None and written.stride(1) != 1 and written.shape[1] > 1:
            raise ValueError(f"{name} must have contiguous columns, got strides {list(written.stride())}")
    x = _with_contiguous_columns(x)
    compute = compute_dtype(x, weight)
    contiguous_dim = "none" if row_idx is not None else describable(x, weight)
    made: list[Tensor] = []

    def run(shape: TileShape) -> None:
        tiles_across = -(-num_columns // shape.columns)
        tiles = segments.max_row_tiles(shape.rows) * tiles_across
        partial = None
        if wants_weight_gradient:
            partial = torch.zeros(segments.num_rows, tiles_across, dtype=torch.float32, device=out.device)
            made[:] = [partial]
        if tiles == 0 or out.numel() == 0:
            return
        launch(
            multiply_rows_kernel,
            num_programs(shape, tiles, out.device),
            out.device,
            *(descriptors_of(x, weight, shape) if shape.uses_descriptors else (x, weight)),
            out,
            hidden,
            activation,
            partial,
            row_idx,
            row_weights,
            segments.offsets,
            segments.num_tokens_per_expert,
            num_experts,
            segments.num_rows,
            x.shape[0],
            segments.capacity,
            num_inner,
            num_columns,
            x.stride(0),
            weight.stride(0),
            weight.stride(1),
            weight.stride(2),
            out.stride(0),
            0 if hidden is None else hidden.stride(0),
            0 if activation is None else activation.stride(0),
            tiles_across,
            EPILOGUE=epilogue,
            COMPUTE=_TYPES[compute],
            CLEARS_PADDING=clears_padding,
            CLEARS_TAIL=clears_tail and segments.offsets is not None,
            DESCRIPTORS=contiguous_dim if shape.uses_descriptors else "none",
            EVEN_INNER=num_inner % shape.inner == 0,
            SPLITS_COLUMNS=shape.splits_columns,
            BLOCK_EXPERTS=segments.block_experts,
            BLOCK_ROWS=shape.rows,
            BLOCK_COLUMNS=shape.columns,
            BLOCK_INNER=shape.inner,
            GROUP=shape.group,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )

    given = (row_idx, row_weights, hidden, activation)
    options = (*(one is not None for one in given), segments.capacity > 0, weight.stride(2) == 1)
    shape = choose_shape(
        epilogue,
        compute=compute,
        dtypes=(x.dtype, weight.dtype, out.dtype),
        rows_per_expert=segments.rows_per_expert,
        sizes=(num_experts, num_inner, num_columns, *(int(option) for option in options)),
        device=out.device,
        allows_descriptors=contiguous_dim != "none",
        launch=run,
    )
    run(shape)
    return made[0].sum(1) if made else None


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The widest dtype of `tensors`: that in which they are multiplied.

    Raises:
        ValueError: it is none that the kernels know, or the tensors are where the kernels do not run.
    """
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    if dtype not in _TYPES:
        raise ValueError(f"rows and weights must be bfloat16, float16 or float32, got {[t.dtype for t in tensors]}")
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"all tensors must be on one device, got {sorted(map(str, devices))}")
    check_device("x", tensors[0])
    return dtype


def _check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")


def _check_rows(name: str, rows: Tensor, num_rows: int, row_idx: Tensor | None) -> None:
    if rows.dim() != 2:
        raise ValueError(f"{name} must have 2 dims, got {list(rows.shape)}")
    if row_idx is None:
        _check(name, rows, (num_rows, rows.shape[1]))
        return
    if row_idx.shape != (num_rows,) or row_idx.dtype not in (torch.int32, torch.int64) or not row_idx.is_contiguous():
        raise ValueError(
            f"row_idx must be contiguous int32 or int64 [{num_rows}], got {row_idx.dtype} {list(row_idx.shape)}"
        )


def _with_contiguous_columns(rows: Tensor) -> Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()
