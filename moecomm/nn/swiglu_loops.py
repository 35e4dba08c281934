"""The experts' computation one by one, and its adjoint: on any device, in any dtype; see `moecomm.kernels.experts`.

Rows that are padding or nobody's: no product touches them, their gradients are zero, and so are their outputs where the
caller asks for it. Experts without rows get weight gradients that are zero tensors. A row of zeros gives a row of zeros
and adds nothing to any gradient.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from moecomm.kernels.experts import ExpertRows
from moecomm.kernels.flat_rows import copied_gradients, copied_outputs
from moecomm.nn.arithmetic import Multiplier, compute_dtype

__all__ = ["LoopExperts"]


@final
class LoopExperts:
    """`ExpertKernels` that read offsets and counts on the host, and refuse those that make no sense.

    Arguments:
        arithmetic: "auto", "native" or "float32", see `compute_dtype`.
        row_by_row: multiply each row by itself, so that its bits do not depend on which rows stand beside it.
    """

    def __init__(self, arithmetic: str, *, row_by_row: bool = False) -> None:
        self._arithmetic = arithmetic
        self._row_by_row = row_by_row

    @property
    def version(self) -> str:
        return f"torch {torch.__version__}"

    def refusal(self, x: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> str | None:
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
        y = torch.empty_like(x) if out is None else out
        hidden = x.new_empty(x.shape[0], gate_up_proj.shape[1]) if keeps_hidden else None
        multiplier = Multiplier(compute_dtype(x, gate_up_proj, self._arithmetic))
        bounds = _bounds(rows)
        pieces = list(enumerate(bounds))
        if self._row_by_row:
            pieces = [(expert, (row, row + 1)) for expert, (begin, end) in pieces for row in range(begin, end)]
        for expert, (begin, end) in pieces:
            if begin < end:
                part = slice(begin, end)
                gate_up = self._hidden(
                    multiplier, x[part], gate_up_proj[expert], None if hidden is None else hidden[part]
                )
                activation = _activation(
                    multiplier, gate_up, None if rows.row_weights is None else rows.row_weights[part]
                )
                self._down(multiplier, activation, down_proj[expert], y[part])
        if out is None:
            _clear_others(y, bounds)
        return y, hidden

    def _hidden(self, multiplier: Multiplier, x: Tensor, weight: Tensor, kept: Tensor | None) -> Tensor:
        """`[n, 2I]` in the dtype of computation; also written to `kept`."""
        if self._row_by_row:
            # Products may add in another order where a row is aligned otherwise, so each is copied to the same place.
            rows = multiplier.scratch("rows", 1, x.shape[1], like=x).copy_(x)
        else:
            rows = multiplier.convert(x, "rows")
        is_direct = kept is not None and kept.dtype == multiplier.dtype
        gate_up = kept if is_direct else multiplier.scratch("gate_up", x.shape[0], weight.shape[0], like=x)
        assert gate_up is not None
        multiplier.rows_times_weight(rows, weight.t(), gate_up)
        if kept is not None and not is_direct:
            kept.copy_(gate_up)
        return gate_up

    def _down(self, multiplier: Multiplier, activation: Tensor, weight: Tensor, y: Tensor) -> None:
        if not self._row_by_row:
            multiplier.rows_times_weight(activation, weight.t(), y)
            return
        output = multiplier.scratch("output", 1, y.shape[1], like=y)
        multiplier.rows_times_weight(activation, weight.t(), output)
        y.copy_(output)

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
        grad_x = torch.empty_like(x) if needs[0] else None
        grad_gate_up_proj, grad_down_proj = (
            torch.empty_like(weight, memory_format=torch.contiguous_format) if need else None
            for weight, need in zip((gate_up_proj, down_proj), needs[1:3], strict=True)
        )
        weights = rows.row_weights
        grad_weights = torch.zeros_like(weights) if needs[3] and weights is not None else None
        multiplier = Multiplier(compute_dtype(x, gate_up_proj, self._arithmetic))
        num_intermediate = down_proj.shape[2]
        bounds = _bounds(rows)
        for expert, (begin, end) in enumerate(bounds):
            num_rows = end - begin
            if num_rows == 0:
                for gradient in (grad_gate_up_proj, grad_down_proj):
                    if gradient is not None:
                        gradient[expert].zero_()
                continue
            part = slice(begin, end)
            gate_up = multiplier.convert(hidden[part], "gate_up")
            gate, up = gate_up[:, :num_intermediate], gate_up[:, num_intermediate:]
            grad_rows = multiplier.convert(grad_y[part], "grad_rows")
            grad_activation = multiplier.scratch("grad_activation", num_rows, num_intermediate, like=x)
            multiplier.rows_times_weight(grad_rows, down_proj[expert], grad_activation)
            grad_gate_up = multiplier.scratch("grad_gate_up", num_rows, 2 * num_intermediate, like=x)
            activation = multiplier.scratch("activation", num_rows, num_intermediate, like=x)
            torch.ops.aten.silu.out(gate, out=activation)
            if weights is not None:
                if grad_weights is not None:
                    wide = grad_weights.dtype
                    products = (grad_activation.to(wide) * activation.to(wide)).mul_(up)
                    torch.sum(products, 1, out=grad_weights[part])
                grad_activation.mul_(weights[part, None])
            torch.mul(grad_activation, activation, out=grad_gate_up[:, num_intermediate:])
            if grad_down_proj is not None:
                activation.mul_(up)
                if weights is not None:
                    activation.mul_(weights[part, None])
                multiplier.weight_gradient(grad_rows, activation, grad_down_proj[expert])
            grad_activation.mul_(up)
            torch.ops.aten.silu_backward.grad_input(
                grad_activation, gate, grad_input=grad_gate_up[:, :num_intermediate]
            )
            if grad_gate_up_proj is not None:
                multiplier.weight_gradient(grad_gate_up, multiplier.convert(x[part], "rows"), grad_gate_up_proj[expert])
            if grad_x is not None:
                multiplier.rows_times_weight(grad_gate_up, gate_up_proj[expert], grad_x[part])
        if grad_x is not None:
            _clear_others(grad_x, bounds)
        return grad_x, grad_gate_up_proj, grad_down_proj, grad_weights


def _activation(multiplier: Multiplier, gate_up: Tensor, weights: Tensor | None) -> Tensor:
    """`[n, I]`: silu(gate) * up, times the weights of the rows."""
    num_rows, num_intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    activation = multiplier.scratch("activation", num_rows, num_intermediate, like=gate_up)
    torch.ops.aten.silu.out(gate_up[:, :num_intermediate], out=activation)
    activation.mul_(gate_up[:, num_intermediate:])
    return activation if weights is None else activation.mul_(weights[:, None])


def _bounds(rows: ExpertRows) -> list[tuple[int, int]]:
    """First row and row after the last real one of each expert."""
    if rows.offsets is None:
        assert rows.num_tokens_per_expert is not None
        counts = rows.num_tokens_per_expert.tolist()
        if any(not 0 <= count <= rows.capacity for count in counts):
            raise ValueError(f"num_tokens_per_expert must be 0 to capacity = {rows.capacity}, got {counts}")
        return [(expert * rows.capacity, expert * rows.capacity + count) for expert, count in enumerate(counts)]
    ends = rows.offsets.tolist()
    begins = [0, *ends][: len(ends)]
    if any(begin > end for begin, end in zip(begins, ends, strict=True)):
        raise ValueError(f"offsets must be 0 or more and not decrease, got {ends}")
    if ends and ends[-1] > rows.num_rows:
        raise ValueError(f"offsets[-1] = {ends[-1]} exceeds the {rows.num_rows} rows of x")
    return list(zip(begins, ends, strict=True))


def _clear_others(rows: Tensor, bounds: list[tuple[int, int]]) -> None:
    """Makes the rows outside of the bounds zero."""
    done = 0
    for begin, end in (*bounds, (rows.shape[0], rows.shape[0])):
        if done < begin:
            rows[done:begin].zero_()
        done = end
