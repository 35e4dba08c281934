"""The experts' computation over rows grouped by expert, and its adjoint, written into given memory.

N rows received, H hidden, I intermediate, E experts of this rank. Rows are grouped by expert: expert e owns the rows
offsets[e-1] .. offsets[e]. For each expert

    hidden = x @ gate_up_proj[e].T           [n, 2I]: I columns of gate, then I of up
    y      = (silu(gate) * up) @ down_proj[e].T

Rows beyond offsets[-1], if any, belong to nobody: no product touches them, their gradients are zero, and so are their
outputs where the caller asks for it. Experts without rows get weight gradients that are zero tensors. A row of zeros
gives a row of zeros and adds nothing to any gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moecomm.nn.arithmetic import Multiplier, compute_dtype

__all__ = ["fill_gradients", "fill_outputs"]


def fill_outputs(
    x: Tensor,
    offsets: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    y: Tensor,
    hidden: Tensor | None,
    arithmetic: str,
    clears_tail: bool = True,
    row_by_row: bool = False,
) -> None:
    """Fills `y` `[N, H]`, and `hidden` `[N, 2I]` unless None.

    Arguments:
        clears_tail: make the rows of `y` beyond offsets[-1] zero; otherwise they are left as they are.
        row_by_row: multiply each row by itself, so that its bits do not depend on which rows stand beside it.
    """
    num_intermediate = down_proj.shape[2]
    multiplier = Multiplier(compute_dtype(x, gate_up_proj, arithmetic))
    bounds = _bounds(offsets, x.shape[0])
    pieces = list(enumerate(bounds))
    if row_by_row:
        pieces = [(expert, (row, row + 1)) for expert, (begin, end) in pieces for row in range(begin, end)]
    for expert, (begin, end) in pieces:
        if begin == end:
            continue
        if row_by_row:
            # Products may add in another order where a row is aligned otherwise, so each is copied to the same place.
            rows = multiplier.scratch("rows", 1, x.shape[1], like=x).copy_(x[begin:end])
        else:
            rows = multiplier.convert(x[begin:end], "rows")
        if hidden is not None and hidden.dtype == multiplier.dtype:
            gate_up = hidden[begin:end]
        else:
            gate_up = multiplier.scratch("gate_up", end - begin, 2 * num_intermediate, like=x)
        multiplier.rows_times_weight(rows, gate_up_proj[expert].t(), gate_up)
        if hidden is not None and hidden.dtype != multiplier.dtype:
            hidden[begin:end].copy_(gate_up)
        activation = multiplier.scratch("activation", end - begin, num_intermediate, like=x)
        torch.ops.aten.silu.out(gate_up[:, :num_intermediate], out=activation)
        activation.mul_(gate_up[:, num_intermediate:])
        if row_by_row:
            output = multiplier.scratch("output", 1, y.shape[1], like=y)
            multiplier.rows_times_weight(activation, down_proj[expert].t(), output)
            y[begin:end].copy_(output)
        else:
            multiplier.rows_times_weight(activation, down_proj[expert].t(), y[begin:end])
    if clears_tail:
        _clear_tail(y, bounds)


def fill_gradients(
    grad_y: Tensor,
    x: Tensor,
    offsets: Tensor,
    gate_up_proj: Tensor,
    *,
    down_proj: Tensor,
    hidden: Tensor,
    grad_x: Tensor | None,
    grad_gate_up_proj: Tensor | None,
    grad_down_proj: Tensor | None,
    arithmetic: str,
) -> None:
    """Fills the gradients that are not None from the output's gradient and what the forward kept."""
    num_intermediate = down_proj.shape[2]
    multiplier = Multiplier(compute_dtype(x, gate_up_proj, arithmetic))
    bounds = _bounds(offsets, x.shape[0])
    for expert, (begin, end) in enumerate(bounds):
        num_rows = end - begin
        if num_rows == 0:
            for gradient in (grad_gate_up_proj, grad_down_proj):
                if gradient is not None:
                    gradient[expert].zero_()
            continue
        gate_up = multiplier.convert(hidden[begin:end], "gate_up")
        gate, up = gate_up[:, :num_intermediate], gate_up[:, num_intermediate:]
        grad_rows = multiplier.convert(grad_y[begin:end], "grad_rows")
        grad_activation = multiplier.scratch("grad_activation", num_rows, num_intermediate, like=x)
        multiplier.rows_times_weight(grad_rows, down_proj[expert], grad_activation)
        grad_gate_up = multiplier.scratch("grad_gate_up", num_rows, 2 * num_intermediate, like=x)
        activation = multiplier.scratch("activation", num_rows, num_intermediate, like=x)
        torch.ops.aten.silu.out(gate, out=activation)
        torch.mul(grad_activation, activation, out=grad_gate_up[:, num_intermediate:])
        if grad_down_proj is not None:
            activation.mul_(up)
            multiplier.weight_gradient(grad_rows, activation, grad_down_proj[expert])
        grad_activation.mul_(up)
        torch.ops.aten.silu_backward.grad_input(grad_activation, gate, grad_input=grad_gate_up[:, :num_intermediate])
        if grad_gate_up_proj is not None:
            multiplier.weight_gradient(
                grad_gate_up, multiplier.convert(x[begin:end], "rows"), grad_gate_up_proj[expert]
            )
        if grad_x is not None:
            multiplier.rows_times_weight(grad_gate_up, gate_up_proj[expert], grad_x[begin:end])
    if grad_x is not None:
        _clear_tail(grad_x, bounds)


def _bounds(offsets: Tensor, num_rows: int) -> list[tuple[int, int]]:
    """First row and row after the last of each expert."""
    ends = offsets.tolist()
    begins = [0, *ends][: len(ends)]
    if any(begin > end for begin, end in zip(begins, ends, strict=True)):
        raise ValueError(f"offsets must be 0 or more and not decrease, got {ends}")
    if ends and ends[-1] > num_rows:
        raise ValueError(f"offsets[-1] = {ends[-1]} exceeds the {num_rows} rows of x")
    return list(zip(begins, ends, strict=True))


def _clear_tail(rows: Tensor, bounds: list[tuple[int, int]]) -> None:
    num_owned = bounds[-1][1] if bounds else 0
    if num_owned < rows.shape[0]:
        rows[num_owned:].zero_()
