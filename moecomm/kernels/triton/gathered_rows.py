"""Gathered rows added up again: every source row gets the sum of the rows that were taken from it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.triton.compile_case import CompileCase, varied
from moecomm.kernels.triton.rounding import rounded, widened
from moecomm.kernels.triton.runtime import launch

__all__ = ["compile_cases", "sum_gathered_rows", "sum_routed_rows", "sum_rows_kernel"]


@triton.jit(do_not_specialize=["num_blocks"])
def sum_rows_kernel(
    rows_ptr: tl.tensor,
    order_ptr: tl.tensor,
    begins_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_columns: tl.tensor,
    stride_rows: tl.tensor,
    stride_out: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    source = (tl.program_id(0) // num_blocks).to(tl.int64)
    columns = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    total = tl.zeros((BLOCK,), tl.float32)
    for place in range(tl.load(begins_ptr + source), tl.load(ends_ptr + source)):
        row = tl.load(order_ptr + place)
        mask = columns < tl.where(row >= 0, num_columns, 0)
        total += widened(tl.load(rows_ptr + row * stride_rows + columns, mask=mask, other=0.0), tl.float32)
    tl.store(out_ptr + source * stride_out + columns, rounded(total, out_ptr.dtype.element_ty), mask=is_column)


def sum_gathered_rows(rows: Tensor, row_idx: Tensor, num_source_rows: int) -> Tensor:
    """out[s] = sum of rows[n] over the n with row_idx[n] = s, in ascending n, in fp32, rounded once.

    Arguments:
        rows: `[N, H]` floating, columns contiguous.
        row_idx: `[N]` int32 or int64; values outside 0 .. S - 1 take part in no sum.
        num_source_rows: S.

    Returns:
        `[S, H]`, dtype of `rows`; zeros where no row was taken from. The order of the sum is always the same.
    """
    out = torch.empty(num_source_rows, rows.shape[1], dtype=rows.dtype, device=rows.device)
    if out.numel() == 0:
        return out
    taken, order = torch.sort(row_idx.long(), stable=True)
    sources = torch.arange(num_source_rows, device=rows.device)
    begins = torch.searchsorted(taken, sources)
    ends = torch.searchsorted(taken, sources, right=True)
    return _sum_rows(rows, order, begins, ends, out)


def sum_routed_rows(rows: Tensor, routes: Tensor, *, out: Tensor | None = None) -> Tensor:
    """out[s] = sum of rows[routes[s, k]] over k in ascending order, in fp32, rounded once.

    Arguments:
        rows: `[N, H]` floating, columns contiguous.
        routes: `[S, K]` int64 contiguous; -1 = nothing.
        out: `[S, H]`, columns contiguous; None = new memory, dtype of `rows`.

    Returns:
        `out`; zeros where all routes are -1.
    """
    num_source_rows, num_topk = routes.shape
    if out is None:
        out = torch.empty(num_source_rows, rows.shape[1], dtype=rows.dtype, device=rows.device)
    if out.numel() == 0:
        return out
    bounds = torch.arange(num_source_rows + 1, device=rows.device) * num_topk
    return _sum_rows(rows, routes, bounds[:-1], bounds[1:], out)


def _sum_rows(rows: Tensor, order: Tensor, begins: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    block = min(1024, triton.next_power_of_2(rows.shape[1]))
    num_blocks = -(-rows.shape[1] // block)
    launch(
        sum_rows_kernel,
        out.shape[0] * num_blocks,
        out.device,
        rows,
        order,
        begins,
        ends,
        out,
        rows.shape[1],
        rows.stride(0),
        out.stride(0),
        num_blocks,
        BLOCK=block,
    )
    return out


def compile_cases() -> list[CompileCase]:
    """Rows of each dtype that gradients have."""
    signature = {
        "order_ptr": "*i64",
        "begins_ptr": "*i64",
        "ends_ptr": "*i64",
        "num_columns": "i32",
        "stride_rows": "i32",
        "stride_out": "i32",
        "num_blocks": "i32",
        "BLOCK": "constexpr",
    }
    aligned = ("rows_ptr", "out_ptr", "num_columns", "stride_rows", "stride_out")
    cases = [
        CompileCase(
            name=f"sum_gathered_rows {dtype}",
            kernel=sum_rows_kernel,
            signature={"rows_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", **signature},
            constexprs={"BLOCK": 1024},
            moves_rows=True,
            attrs=dict.fromkeys(aligned, 16),
        )
        for dtype in ("bf16", "fp16", "fp32")
    ]
    return cases + varied(cases[0], [{"BLOCK": 1}])
