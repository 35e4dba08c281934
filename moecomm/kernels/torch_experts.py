"""The experts by torch's own grouped product, `torch.nn.functional.grouped_mm`."""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["TorchExpertKernels"]

_ALIGNMENT = 16  # bytes


@final
class TorchExpertKernels:
    """`ExpertKernels` without kernels of our own. What grouped_mm leaves undefined is made zero afterwards."""

    @property
    def version(self) -> str:
        return f"torch {torch.__version__}"

    def refusal(self, x: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> str | None:
        if not hasattr(F, "grouped_mm"):
            return f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
        dtypes = {x.dtype, gate_up_proj.dtype, down_proj.dtype}
        known = [torch.bfloat16] if x.is_cuda else [torch.bfloat16, torch.float16, torch.float32]
        if len(dtypes) > 1 or x.dtype not in known:
            return f"grouped_mm multiplies tensors of one dtype of {known}, got {sorted(map(str, dtypes))}"
        widths = (x.shape[1], down_proj.shape[2])
        if any(width * x.element_size() % _ALIGNMENT for width in widths):
            return f"grouped_mm needs rows of a multiple of {_ALIGNMENT} bytes, got hidden and intermediate {widths}"
        if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0):
            return "grouped_mm needs compute capability 8.0"
        return None

    def outputs(
        self,
        x: Tensor,
        offsets: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        *,
        out: Tensor | None,
        keeps_hidden: bool,
    ) -> tuple[Tensor, Tensor | None]:
        if gate_up_proj.shape[0] == 0 or x.shape[0] == 0:
            hidden = x.new_empty(x.shape[0], gate_up_proj.shape[1]) if keeps_hidden else None
            return torch.zeros_like(x) if out is None else out, hidden
        ends = offsets.to(torch.int32)
        hidden = F.grouped_mm(x, gate_up_proj.transpose(1, 2), offs=ends)
        gate, up = hidden.chunk(2, dim=1)
        activation = F.silu(gate).mul_(up)
        y = F.grouped_mm(activation, down_proj.transpose(1, 2), offs=ends)
        if out is None:
            y.masked_fill_(_beyond(ends, y), 0)
        else:
            y = torch.where(_beyond(ends, y), out, y, out=out)
        return y, hidden if keeps_hidden else None

    def gradients(
        self,
        grad_y: Tensor,
        x: Tensor,
        offsets: Tensor,
        gate_up_proj: Tensor,
        *,
        down_proj: Tensor,
        hidden: Tensor,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if gate_up_proj.shape[0] == 0 or x.shape[0] == 0:
            first, second, third = (
                torch.zeros_like(tensor) if need else None
                for tensor, need in zip((x, gate_up_proj, down_proj), needs, strict=True)
            )
            return first, second, third
        ends = offsets.to(torch.int32)
        gate, up = hidden.chunk(2, dim=1)
        activation = F.silu(gate)
        grad_activation = F.grouped_mm(grad_y, down_proj, offs=ends)
        grad_hidden = torch.empty_like(hidden)
        grad_gate, grad_up = grad_hidden.chunk(2, dim=1)
        torch.mul(grad_activation, activation, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad_activation.mul_(up), gate, grad_input=grad_gate)
        grad_x = grad_gate_up_proj = grad_down_proj = None
        if needs[2]:
            grad_down_proj = _weight_gradient(grad_y, activation.mul_(up), ends)
        if needs[1]:
            grad_gate_up_proj = _weight_gradient(grad_hidden, x, ends)
        if needs[0]:
            grad_x = F.grouped_mm(grad_hidden, gate_up_proj, offs=ends)
            grad_x.masked_fill_(_beyond(ends, grad_x), 0)
        return grad_x, grad_gate_up_proj, grad_down_proj


def _weight_gradient(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    gradient = F.grouped_mm(left.t(), right, offs=ends)
    # On some devices an empty sum gives what was in memory before (pytorch issue 172439).
    return gradient.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None], 0)


def _beyond(ends: Tensor, rows: Tensor) -> Tensor:
    """`[N, 1]` bool: rows of nobody."""
    return (torch.arange(rows.shape[0], device=rows.device) >= ends[-1]).unsqueeze(1)
