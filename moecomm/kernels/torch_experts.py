"""The experts by torch's own grouped product, `torch.nn.functional.grouped_mm`."""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from moecomm.kernels.experts import ExpertRows
from moecomm.kernels.flat_rows import copied_gradients, copied_outputs

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
        rows: ExpertRows,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        *,
        out: Tensor | None,
        keeps_hidden: bool,
    ) -> tuple[Tensor, Tensor | None]:
        if rows.gathered is not None:
            return copied_outputs(self, x, rows, gate_up_proj, down_proj, out=out, keeps_hidden=keeps_hidden)
        if gate_up_proj.shape[0] == 0 or x.shape[0] == 0:
            hidden = x.new_empty(x.shape[0], gate_up_proj.shape[1]) if keeps_hidden else None
            return torch.zeros_like(x) if out is None else out, hidden
        ends, is_other = _ends(rows), _is_other(rows)
        hidden = F.grouped_mm(_real(x, rows, is_other), gate_up_proj.transpose(1, 2), offs=ends)
        gate, up = hidden.chunk(2, dim=1)
        activation = F.silu(gate).mul_(up)
        if rows.row_weights is not None:
            activation.mul_(rows.row_weights[:, None])
        y = F.grouped_mm(activation, down_proj.transpose(1, 2), offs=ends)
        if out is None:
            y.masked_fill_(is_other, 0)
        else:
            y = torch.where(is_other, out, y, out=out)
        return y, hidden if keeps_hidden else None

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
        if rows.gathered is not None:
            return copied_gradients(
                self, grad_y, x, rows, gate_up_proj, down_proj=down_proj, hidden=hidden, needs=needs
            )
        weights = rows.row_weights
        grad_x = grad_gate_up_proj = grad_down_proj = grad_weights = None
        if gate_up_proj.shape[0] == 0 or x.shape[0] == 0:
            grad_x, grad_gate_up_proj, grad_down_proj = (
                torch.zeros_like(tensor) if need else None
                for tensor, need in zip((x, gate_up_proj, down_proj), needs[:3], strict=True)
            )
            return grad_x, grad_gate_up_proj, grad_down_proj, torch.zeros_like(weights) if weights is not None else None
        ends, is_other = _ends(rows), _is_other(rows)
        grad_y = _real(grad_y, rows, is_other)
        gate, up = hidden.chunk(2, dim=1)
        activation = F.silu(gate)
        grad_activation = F.grouped_mm(grad_y, down_proj, offs=ends)
        if weights is not None:
            if needs[3]:
                products = (grad_activation.to(weights.dtype) * activation.to(weights.dtype)).mul_(up)
                grad_weights = products.sum(1).masked_fill_(is_other.squeeze(1), 0)
            grad_activation.mul_(weights[:, None])
        grad_hidden = torch.empty_like(hidden)
        grad_gate, grad_up = grad_hidden.chunk(2, dim=1)
        torch.mul(grad_activation, activation, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad_activation.mul_(up), gate, grad_input=grad_gate)
        if needs[2]:
            activation.mul_(up)
            if weights is not None:
                activation.mul_(weights[:, None])
            grad_down_proj = _weight_gradient(grad_y, activation, ends)
        if needs[1]:
            grad_gate_up_proj = _weight_gradient(grad_hidden, _real(x, rows, is_other), ends)
        if needs[0]:
            grad_x = F.grouped_mm(grad_hidden, gate_up_proj, offs=ends)
            grad_x.masked_fill_(is_other, 0)
        return grad_x, grad_gate_up_proj, grad_down_proj, grad_weights


def _weight_gradient(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    gradient = F.grouped_mm(left.t(), right, offs=ends)
    # On some devices an empty sum gives what was in memory before (pytorch issue 172439).
    return gradient.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None], 0)


def _ends(rows: ExpertRows) -> Tensor:
    """`[E]` int32. A slab is multiplied whole: grouped_mm knows of no gaps between the rows of two experts."""
    if rows.offsets is not None:
        return rows.offsets.to(torch.int32)
    assert rows.num_tokens_per_expert is not None
    counts = rows.num_tokens_per_expert
    return torch.arange(1, counts.numel() + 1, device=counts.device, dtype=torch.int32) * rows.capacity


def _is_other(rows: ExpertRows) -> Tensor:
    """`[N, 1]` bool: rows that are padding or nobody's."""
    if rows.offsets is not None:
        return (torch.arange(rows.num_rows, device=rows.offsets.device) >= rows.offsets[-1]).unsqueeze(1)
    assert rows.num_tokens_per_expert is not None
    counts = rows.num_tokens_per_expert
    return (torch.arange(rows.capacity, device=counts.device) >= counts.unsqueeze(1)).view(-1, 1)


def _real(x: Tensor, rows: ExpertRows, is_other: Tensor) -> Tensor:
    """`x`; of a slab a copy, whose padding is zero and so adds nothing to any product."""
    return x if rows.offsets is not None else x.masked_fill(is_other, 0)
