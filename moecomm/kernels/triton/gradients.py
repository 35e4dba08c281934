"""What the backward of a weighted sum needs: scaled gradients, and dot products in a stated order of summation.

N rows   H columns
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.base import NUM_DOT_LANES, weights_dtype
from moecomm.kernels.triton.compile_case import CompileCase, varied
from moecomm.kernels.triton.rounding import TRITON_DTYPES, rounded, widened
from moecomm.kernels.triton.runtime import alignment_of, launch, num_blocks
from moecomm.kernels.triton.tiles import Moves, numbers_of, row_pointers

__all__ = ["compile_cases", "scale_dot"]

_ROWS = 32


@triton.jit(do_not_specialize=["scaled", "g", "y", "num_rows", "num_units"])
def scale_dot_kernel(
    scaled: tl.int64,
    dots: tl.tensor,
    g: tl.int64,
    y: tl.int64,
    weights: tl.tensor,
    num_rows: tl.int64,
    num_units: tl.int32,
    DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PER_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """`scaled`, `g`, `y`: addresses of `[N, H]`. Column c is added to partial sum c % LANES; then halves are added."""
    num_columns = num_units * PER_UNIT
    row_bytes = tl.cast(num_units, tl.int64) * ALIGNMENT
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    is_row = n < num_rows
    weight = tl.load(weights + n, mask=is_row, other=0.0)
    g_row = row_pointers(tl.cast(g, tl.int64) + n * row_bytes, DTYPE, ALIGNMENT)
    y_row = row_pointers(tl.cast(y, tl.int64) + n * row_bytes, DTYPE, ALIGNMENT)
    scaled_row = row_pointers(tl.cast(scaled, tl.int64) + n * row_bytes, DTYPE, ALIGNMENT)
    total = tl.zeros((ROWS, LANES), dtype=weights.dtype.element_ty)
    for first in tl.range(0, num_columns, LANES, loop_unroll_factor=2):
        c = (first + lane)[None, :]
        mask = is_row[:, None] & (c < num_columns)
        gradient = widened(tl.load(g_row + c, mask=mask, other=0.0), weights.dtype.element_ty)
        row = widened(tl.load(y_row + c, mask=mask, other=0.0), weights.dtype.element_ty)
        total = total + gradient * row
        tl.store(scaled_row + c, rounded(weight[:, None] * gradient, DTYPE), mask=mask)
    # Sums of two numbers each, so their order within is nobody's choice.
    total = tl.sum(tl.reshape(total, (ROWS, 2, LANES // 2)), axis=1)
    total = tl.sum(tl.reshape(total, (ROWS, 2, LANES // 4)), axis=1)
    total = tl.sum(tl.reshape(total, (ROWS, 2, LANES // 8)), axis=1)
    total = tl.sum(tl.reshape(total, (ROWS, 2, LANES // 16)), axis=1)
    total = tl.sum(tl.reshape(total, (ROWS, 2)), axis=1)
    tl.store(dots + n, rounded(total, weights.dtype.element_ty), mask=is_row)


def scale_dot(g: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """As in `moecomm.kernels.base`; arguments are checked."""
    scaled, dots = torch.empty_like(g), torch.empty_like(weights)
    num_rows, hidden = g.shape
    row_bytes = hidden * g.element_size()
    alignment = alignment_of(row_bytes, g.data_ptr(), y.data_ptr(), scaled.data_ptr())
    moves = numbers_of("a row", g.dtype, row_bytes, alignment)
    launch(
        scale_dot_kernel,
        num_blocks(num_rows, _ROWS),
        g.device,
        *(scaled.data_ptr(), dots, g.data_ptr(), y.data_ptr(), weights, num_rows, moves.num_units),
        **_constants(moves),
    )
    return scaled, dots


def _constants(moves: Moves) -> dict[str, object]:
    return {
        "DTYPE": moves.dtype,
        "ALIGNMENT": moves.alignment,
        "PER_UNIT": moves.per_unit,
        "ROWS": _ROWS,
        "LANES": NUM_DOT_LANES,
    }


def compile_cases() -> list[CompileCase]:
    """Every dtype."""
    cases: list[CompileCase] = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        wide = f"*{TRITON_DTYPES[weights_dtype(dtype)]}"
        constants = _constants(numbers_of("a row", dtype, 4096, 16))
        cases.append(
            CompileCase(
                name=f"scale_dot {TRITON_DTYPES[dtype]}",
                kernel=scale_dot_kernel,
                signature={
                    "scaled": "i64",
                    "dots": wide,
                    "g": "i64",
                    "y": "i64",
                    "weights": wide,
                    "num_rows": "i64",
                    "num_units": "i32",
                    **dict.fromkeys(constants, "constexpr"),
                },
                constexprs=constants,
                moves_rows=True,
            )
        )
        cases += varied(cases[-1], [_constants(numbers_of("a row", dtype, dtype.itemsize, dtype.itemsize))])
    return cases
