"""The experts' computation as a torch op: differentiable, traceable, and able to write into given memory.

`moecomm::grouped_swiglu` is what users and compilers see; `..._keeping` and `..._backward` are its halves under
autograd, so that a traced backward is one node too. They are defined by hand, because the decorator for custom ops
costs several times more per call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moecomm.nn.swiglu_loops import fill_gradients, fill_outputs

__all__ = ["grouped_swiglu"]


def grouped_swiglu(
    x: Tensor,
    offsets: Tensor,
    gate_up_proj: Tensor,
    *,
    down_proj: Tensor,
    out: Tensor | None = None,
    arithmetic: str = "auto",
    row_by_row: bool = False,
) -> Tensor:
    """Applies each expert to its rows. Differentiable (once) in `x`, `gate_up_proj` and `down_proj`.

    Arguments:
        x: `[N, H]` floating.
        offsets: `[E]` int32 or int64, inclusive prefix sums of the rows per expert; offsets[-1] <= N.
        gate_up_proj: `[E, 2I, H]`.
        down_proj: `[E, H, I]`, dtype of `gate_up_proj`, which may differ from that of `x`.
        out: `[N, H]`, contiguous, dtype of `x`; the last product writes into it. None = new memory.
        arithmetic: "auto", "native" or "float32", see `compute_dtype`.
        row_by_row: multiply each row by itself, so that its bits do not depend on the others. Without gradients only.

    Returns:
        `[N, H]`, dtype of `x`; in the memory of `out` if given. Rows beyond offsets[-1] are zero; in `out` they are
        left as they are.

    Raises:
        ValueError: shapes or offsets that do not fit together; `row_by_row` with gradients or within a compiler.
    """
    if row_by_row:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            raise ValueError("row_by_row must be False where gradients are enabled or a compiler traces, got True")
        y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out.detach()
        fill_outputs(
            x.contiguous(),
            offsets,
            gate_up_proj,
            down_proj,
            y=y,
            hidden=None,
            arithmetic=arithmetic,
            clears_tail=out is None,
            row_by_row=True,
        )
        return y
    if out is None:
        return torch.ops.moecomm.grouped_swiglu(x, offsets, gate_up_proj, down_proj, arithmetic)  # type: ignore[no-any-return]
    if torch.compiler.is_compiling():
        # A compiler plans the memory itself; the copy it makes of this is its own business.
        return out.copy_(torch.ops.moecomm.grouped_swiglu(x, offsets, gate_up_proj, down_proj, arithmetic))
    if not torch.is_grad_enabled():
        y = out.detach()
        _fill_given(x, offsets, gate_up_proj, down_proj, y=y, hidden=None, arithmetic=arithmetic)
        return y
    return _GroupedSwiglu.apply(x, offsets, gate_up_proj, down_proj, out, arithmetic)  # type: ignore[no-any-return, no-untyped-call]


def _fill_given(
    x: Tensor,
    offsets: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    y: Tensor,
    hidden: Tensor | None,
    arithmetic: str,
) -> None:
    """`fill_outputs` into memory that the caller gave, whose rows beyond the last are not worth the time to clear."""
    fill_outputs(
        x.contiguous(),
        offsets,
        gate_up_proj,
        down_proj,
        y=y,
        hidden=hidden,
        arithmetic=arithmetic,
        clears_tail=False,
    )


def _op_forward(x: Tensor, offsets: Tensor, gate_up_proj: Tensor, down_proj: Tensor, arithmetic: str) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    fill_outputs(x.contiguous(), offsets, gate_up_proj, down_proj, y=y, hidden=None, arithmetic=arithmetic)
    return y


def _op_forward_keeping(
    x: Tensor, offsets: Tensor, gate_up_proj: Tensor, down_proj: Tensor, arithmetic: str
) -> tuple[Tensor, Tensor]:
    y, hidden = _fake_forward_keeping(x, offsets, gate_up_proj, down_proj, arithmetic)
    fill_outputs(x.contiguous(), offsets, gate_up_proj, down_proj, y=y, hidden=hidden, arithmetic=arithmetic)
    return y, hidden


def _op_backward(
    grad_y: Tensor,
    x: Tensor,
    offsets: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    hidden: Tensor,
    needs: list[bool],
    arithmetic: str,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = _fake_backward(grad_y, x, offsets, gate_up_proj, down_proj, hidden, needs, arithmetic)
    wanted = [grad if need else None for grad, need in zip(grads, needs, strict=True)]
    fill_gradients(
        grad_y.contiguous(),
        x.contiguous(),
        offsets,
        gate_up_proj,
        down_proj=down_proj,
        hidden=hidden,
        grad_x=wanted[0],
        grad_gate_up_proj=wanted[1],
        grad_down_proj=wanted[2],
        arithmetic=arithmetic,
    )
    return grads


def _fake_forward(x: Tensor, offsets: Tensor, gate_up_proj: Tensor, down_proj: Tensor, arithmetic: str) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake_forward_keeping(
    x: Tensor, offsets: Tensor, gate_up_proj: Tensor, down_proj: Tensor, arithmetic: str
) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, torch.empty(x.shape[0], gate_up_proj.shape[1], dtype=x.dtype, device=x.device)


def _fake_backward(
    grad_y: Tensor,
    x: Tensor,
    offsets: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    hidden: Tensor,
    needs: list[bool],
    arithmetic: str,
) -> tuple[Tensor, Tensor, Tensor]:
    # A gradient that nobody needs is an empty tensor: an op cannot return None.
    shapes = [tensor.shape if need else (0,) for tensor, need in zip((x, gate_up_proj, down_proj), needs, strict=True)]
    dtypes = (x.dtype, gate_up_proj.dtype, down_proj.dtype)
    first, second, third = (
        torch.empty(shape, dtype=dtype, device=x.device) for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    return first, second, third


class _GroupedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        offsets: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        out: Tensor | None,
        arithmetic: str,
    ) -> Tensor:
        y: Tensor
        ctx.arithmetic = arithmetic
        if out is None:
            y, hidden = torch.ops.moecomm.grouped_swiglu_keeping(x, offsets, gate_up_proj, down_proj, arithmetic)
        else:
            # Another tensor on the same memory: to autograd the result is new, and `out` stays what it was.
            y = out.detach()
            hidden = x.new_empty(x.shape[0], gate_up_proj.shape[1]) if any(ctx.needs_input_grad) else None
            _fill_given(x, offsets, gate_up_proj, down_proj, y=y, hidden=hidden, arithmetic=arithmetic)
        ctx.save_for_backward(x, offsets, gate_up_proj, down_proj, hidden)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, offsets, gate_up_proj, down_proj, hidden = ctx.saved_tensors
        needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[2], ctx.needs_input_grad[3]]
        grads = torch.ops.moecomm.grouped_swiglu_backward(
            grad_y, x, offsets, gate_up_proj, down_proj, hidden, needs, ctx.arithmetic
        )
        grad_x, grad_gate_up_proj, grad_down_proj = (
            grad if need else None for grad, need in zip(grads, needs, strict=True)
        )
        return grad_x, None, grad_gate_up_proj, grad_down_proj, None, None


def _op_autograd(x: Tensor, offsets: Tensor, gate_up_proj: Tensor, down_proj: Tensor, arithmetic: str) -> Tensor:
    if torch.is_grad_enabled() and (x.requires_grad or gate_up_proj.requires_grad or down_proj.requires_grad):
        return _GroupedSwiglu.apply(x, offsets, gate_up_proj, down_proj, None, arithmetic)  # type: ignore[no-any-return, no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.moecomm.grouped_swiglu(x, offsets, gate_up_proj, down_proj, arithmetic)  # type: ignore[no-any-return]


_ARGUMENTS = "Tensor x, Tensor offsets, Tensor gate_up_proj, Tensor down_proj"
_library: Any = torch.library.Library("moecomm", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"grouped_swiglu({_ARGUMENTS}, str arithmetic) -> Tensor")
_library.define(f"grouped_swiglu_keeping({_ARGUMENTS}, str arithmetic) -> (Tensor, Tensor)")
_library.define(
    f"grouped_swiglu_backward(Tensor grad_y, {_ARGUMENTS}, Tensor hidden, bool[] needs, str arithmetic) "
    "-> (Tensor, Tensor, Tensor)"
)
for _name, _implementation, _fake in (
    ("grouped_swiglu", _op_forward, _fake_forward),
    ("grouped_swiglu_keeping", _op_forward_keeping, _fake_forward_keeping),
    ("grouped_swiglu_backward", _op_backward, _fake_backward),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _key)
    torch.library.register_fake(f"moecomm::{_name}", _fake, lib=_library)
_library.impl("grouped_swiglu", _op_autograd, "Autograd")
