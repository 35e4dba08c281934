"""Matrix products of half-precision tensors on CPUs, with or without instructions for them.

Without such instructions torch multiplies bf16 and fp16 matrices in plain loops, up to a hundred times slower than
fp32. Then panels of the operands are converted to fp32 and multiplied by the fp32 BLAS; each result is rounded once.
"""

from __future__ import annotations

import functools
from typing import Literal, cast

import torch
from torch import Tensor

__all__ = ["ARITHMETICS", "Arithmetic", "Multiplier", "compute_dtype", "has_native_matmul"]

Arithmetic = Literal["auto", "native", "float32"]
ARITHMETICS = ("auto", "native", "float32")

# Elements of a converted panel: 1 MiB of fp32, which stays in the second-level cache between conversion and product.
_PANEL_ELEMENTS = 1 << 18

_INSTRUCTIONS = {
    torch.bfloat16: (("avx512_bf16", "amx_bf16"), "_is_mkldnn_bf16_supported"),
    torch.float16: (("avx512_fp16", "amx_fp16"), "_is_mkldnn_fp16_supported"),
}


@functools.cache
def has_native_matmul(dtype: torch.dtype) -> bool:
    """Whether this CPU has matrix instructions for `dtype` and torch uses them. Decided once per process."""
    if dtype not in _INSTRUCTIONS:
        return True
    names, supported = _INSTRUCTIONS[dtype]
    capabilities = torch.cpu.get_capabilities()
    if not any(capabilities.get(name, False) for name in names) or not torch._C._has_mkldnn:
        return False
    return bool(getattr(torch.ops.mkldnn, supported)())


def compute_dtype(x: Tensor, weight: Tensor, arithmetic: str) -> torch.dtype:
    """The dtype in which products of `x` and `weight` are computed.

    Their common dtype where the hardware has it; otherwise fp32, or fp64 when one of them is fp64. "native" and
    "float32" overrule the look at the CPU for half-precision pairs. Other devices than the CPU count as native.
    """
    common = torch.promote_types(x.dtype, weight.dtype)
    if common not in _INSTRUCTIONS:
        return common
    if x.dtype != weight.dtype or arithmetic == "float32":
        return torch.float32
    if arithmetic == "native" or x.device.type != "cpu" or has_native_matmul(common):
        return common
    return torch.float32


class Multiplier:
    """Products into given memory, in one dtype, with one scratch panel that is used again and again.

    Arguments:
        dtype: in which products are computed; operands and results of other dtypes are converted panel by panel.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._scratch: dict[str, Tensor] = {}

    def convert(self, x: Tensor, name: str) -> Tensor:
        """`x` itself, or a copy of it in the dtype of computation, which the next call of that name overwrites."""
        return x if x.dtype == self.dtype else self.scratch(name, *x.shape, like=x).copy_(x)

    def scratch(self, name: str, num_rows: int, num_columns: int, *, like: Tensor) -> Tensor:
        """Uninitialised `[num_rows, num_columns]` in the dtype of computation; the next call of that name reuses it."""
        size = num_rows * num_columns
        held = self._scratch.get(name)
        if held is None or held.numel() < size:
            held = torch.empty(size, dtype=self.dtype, device=like.device)
            self._scratch[name] = held
        return held[:size].view(num_rows, num_columns)

    def rows_times_weight(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """out = x @ weight.

        Arguments:
            x: `[n, k]` in the dtype of computation.
            weight: `[k, m]`, any strides, any dtype.
            out: `[n, m]`, any dtype.
        """
        if weight.dtype == self.dtype and out.dtype == self.dtype:
            torch.mm(x, weight, out=out)
            return
        num_inner, num_columns = weight.shape
        step = max(1, _PANEL_ELEMENTS // max(1, num_inner))
        for begin in range(0, num_columns, step):
            columns = slice(begin, min(begin + step, num_columns))
            # A weight that comes transposed is converted along its rows in memory and read transposed by the product.
            source = weight[:, columns]
            panel = self.convert(source.t(), "panel").t() if source.stride(0) == 1 else self.convert(source, "panel")
            if out.dtype == self.dtype:
                torch.mm(x, panel, out=out[:, columns])
                continue
            product = self.scratch("product", x.shape[0], panel.shape[1], like=x)
            out[:, columns].copy_(torch.mm(x, panel, out=product))

    def weight_gradient(self, rows: Tensor, columns: Tensor, out: Tensor) -> None:
        """out = rows.T @ columns, a sum over n.

        Arguments:
            rows: `[n, m]` in the dtype of computation.
            columns: `[n, k]` in the dtype of computation.
            out: `[m, k]`, any dtype.
        """
        if out.dtype == self.dtype:
            torch.mm(rows.t(), columns, out=out)
            return
        num_rows = rows.shape[1]
        step = max(1, _PANEL_ELEMENTS // max(1, columns.shape[1]))
        for begin in range(0, num_rows, step):
            part = slice(begin, min(begin + step, num_rows))
            product = self.scratch("panel", min(step, num_rows - begin), columns.shape[1], like=rows)
            out[part].copy_(torch.mm(rows[:, part].t(), columns, out=product))


def as_arithmetic(value: str) -> Arithmetic:
    """Checks the name of an arithmetic.

    Raises:
        ValueError: it is none of `ARITHMETICS`.
    """
    if value not in ARITHMETICS:
        raise ValueError(f"arithmetic must be one of {list(ARITHMETICS)}, got {value!r}")
    return cast("Arithmetic", value)
