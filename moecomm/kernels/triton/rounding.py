"""Numbers on the device: rows are added in fp32 or fp64, then rounded once to the nearest even, with canonical NaN."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["TRITON_DTYPES", "rounded", "widened"]

TRITON_DTYPES: dict[torch.dtype, Any] = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int64: tl.int64,
    torch.int32: tl.int32,
}
"""What Triton calls the dtypes of rows, values and ids."""


@triton.jit
def widened(number: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """Rows' numbers in fp32 or fp64."""
    if number.dtype == tl.bfloat16:
        # By hand: the interpreter gets numbers wrong that are too small to be normal.
        return (number.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return number.to(WIDE)


@triton.jit
def rounded(wide: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """An fp32 or fp64 tensor in this dtype of rows."""
    if DTYPE == tl.bfloat16:
        # By hand: the interpreter cuts off, and processors differ in the NaN that they make.
        bits = wide.to(tl.uint32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(wide != wide, 0x7FC0, even).to(tl.uint16).to(DTYPE, bitcast=True)
    elif DTYPE == tl.float16:
        half = wide.to(tl.float16).to(tl.uint16, bitcast=True)
        return tl.where(wide != wide, 0x7E00, half).to(tl.uint16).to(DTYPE, bitcast=True)
    elif DTYPE == tl.float32:
        single = wide.to(tl.uint32, bitcast=True)
        return tl.where(wide != wide, 0x7FC00000, single).to(tl.uint32).to(DTYPE, bitcast=True)
    else:
        double = wide.to(tl.uint64, bitcast=True)
        return tl.where(wide != wide, 0x7FF8000000000000, double).to(tl.uint64).to(DTYPE, bitcast=True)
