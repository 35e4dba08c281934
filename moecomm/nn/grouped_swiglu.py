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

from moecomm.kernels.registry import expert_kernels_for
from moecomm.nn.backends import choose_backend
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
    backend: str = "auto",
) -> Tensor:
    """Applies each expert to its rows. Differentiable (once) in `x`, `gate_up_proj` and `down_proj`.

    Arguments:
        x: `[N, H]` floating.
        offsets: `[E]` int32 or int64, inclusive prefix sums of the rows per expert; offsets[-1] <= N.
        gate_up_proj: `[E, 2I, H]`.
        down_proj: `[E, H, I]`, dtype of `gate_up_proj`, which may differ from that of `x`.
        out: `[N, H]`, contiguous, dtype of `x`; the last product writes into it. None = new memory.
        arithmetic: "auto", "native" or "float32", see `compute_dtype`.
        row_by_row: multiply each row by itself, so that its bits do not depend on the others. Without gradients only,
            and always by "loops".
        backend: "auto", "loops", "torch" or "triton", see `moecomm.nn.backends`. All but "loops" trust `offsets`.

    Returns:
        `[N, H]`, dtype of `x`; in the memory of `out` if given. Rows beyond offsets[-1] are zero; in `out` they are
        left as they are.

    Raises:
        ValueError: shapes or offsets that do not fit together; `row_by_row` with gradients or within a compiler; a
            backend that cannot serve such tensors.
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
    tensors = (x, offsets, gate_up_proj, down_proj)
    if out is None:
        return torch.ops.moecomm.grouped_swiglu(*tensors, arithmetic, backend)  # type: ignore[no-any-return]
    if torch.compiler.is_compiling():
        # A compiler plans the memory itself; the copy it makes of this is its own business.
        return out.copy_(torch.ops.moecomm.grouped_swiglu(*tensors, arithmetic, backend))
    if not torch.is_grad_enabled():
        return _outputs(*tensors, out=out.detach(), keeps_hidden=False, arithmetic=arithmetic, backend=backend)[0]
    return _GroupedSwiglu.apply(*tensors, out, arithmetic, backend)  # type: ignore[no-any-return, no-untyped-call]


def _outputs(
    x: Tensor,
    offsets: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    out: Tensor | None,
    keeps_hidden: bool,
    arithmetic: str,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """The outputs, and gate and up if they are kept. Rows of a given `out` beyond the last are not worth clearing."""
    chosen = choose_backend(backend, x, offsets, gate_up_proj, down_proj=down_proj, trains=keeps_hidden)
    x = x.contiguous()
    if chosen != "loops":
        return expert_kernels_for(chosen).outputs(
            x, offsets, gate_up_proj, down_proj, out=out, keeps_hidden=keeps_hidden
        )
    y = torch.empty_like(x) if out is None else out
    hidden = x.new_empty(x.shape[0], gate_up_proj.shape[1]) if keeps_hidden else None
    fill_outputs(
        x, offsets, gate_up_proj, down_proj, y=y, hidden=hidden, arithmetic=arithmetic, clears_tail=out is None
    )
    return y, hidden


def _op_forward(
    x: Tensor, offsets: Tensor, gate_up_proj: Tensor, down_proj: Tensor, arithmetic: str, backend: str = "auto"
) -> Tensor:
    tensors = (x, offsets, gate_up_proj, down_proj)
    return _outputs(*tensors, out=None, keeps_hidden=False, arithmetic=arithmetic, backend=backend)[0]


def _op_forward_keeping(
    x: Tensor, offsets: Tensor, gate_up_proj: Tensor, down_proj: Tensor, arithmetic: str, backend: str
) -> tuple[Tensor, Tensor]:
    tensors = (x, offsets, gate_up_proj, down_proj)
    y, hidden = _outputs(*tensors, out=None, keeps_hidden=True, arithmetic=arithmetic, backend=backend)
    assert hidden is not None
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
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    chosen = choose_backend(backend, x, offsets, gate_up_proj, down_proj=down_proj, trains=True)
    if chosen != "loops":
        made = expert_kernels_for(chosen).gradients(
            grad_y.contiguous(),
            x.contiguous(),
            offsets,
            gate_up_proj,
            down_proj=down_proj,
            hidden=hidden,
            needs=(needs[0], needs[1], needs[2]),
        )
        first, second, third = (
            like.new_empty(0) if grad is None else grad
            for grad, like in zip(made, (x, gate_up_proj, down_proj), strict=True)
        )
        return first, second, third
    grads = _fake_backward(grad_y, x, offsets, gate_up_proj, down_proj, hidden, needs, arithmetic, backend)
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


def _fake_forward(
    x: Tensor, offsets: Tensor, gate_up_proj: Tensor, down_proj: Tensor, arithmetic: str, backend: str = "auto"
) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake_forward_keeping(
    x: Tensor, offsets: Tensor, gate_up_proj: Tensor, down_proj: Tensor, arithmetic: str, backend: str
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
    backend: str,
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
        backend: str,
    ) -> Tensor:
        y: Tensor
        ctx.arithmetic = arithmetic
        ctx.backend = backend
        tensors = (x, offsets, gate_up_proj, down_proj)
        if out is None:
            y, hidden = torch.ops.moecomm.grouped_swiglu_keeping(*tensors, arithmetic, backend)
        else:
            # Another tensor on the same memory: to autograd the result is new, and `out` stays what it was.
            y, hidden = _outputs(
                *tensors,
                out=out.detach(),
                keeps_hidden=any(ctx.needs_input_grad),
                arithmetic=arithmetic,
                backend=backend,
            )
        ctx.save_for_backward(x, offsets, gate_up_proj, down_proj, hidden)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, offsets, gate_up_proj, down_proj, hidden = ctx.saved_tensors
        needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[2], ctx.needs_input_grad[3]]
        grads = torch.ops.moecomm.grouped_swiglu_backward(
            grad_y, x, offsets, gate_up_proj, down_proj, hidden, needs, ctx.arithmetic, ctx.backend
        )
        grad_x, grad_gate_up_proj, grad_down_proj = (
            grad if need else None for grad, need in zip(grads, needs, strict=True)
        )
        return grad_x, None, grad_gate_up_proj, grad_down_proj, None, None, None


def _op_autograd(
    x: Tensor, offsets: Tensor, gate_up_proj: Tensor, down_proj: Tensor, arithmetic: str, backend: str = "auto"
) -> Tensor:
    tensors = (x, offsets, gate_up_proj, down_proj)
    if torch.is_grad_enabled() and (x.requires_grad or gate_up_proj.requires_grad or down_proj.requires_grad):
        return _GroupedSwiglu.apply(*tensors, None, arithmetic, backend)  # type: ignore[no-any-return, no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.moecomm.grouped_swiglu(*tensors, arithmetic, backend)  # type: ignore[no-any-return]


_ARGUMENTS = "Tensor x, Tensor offsets, Tensor gate_up_proj, Tensor down_proj"
_library: Any = torch.library.Library("moecomm", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"grouped_swiglu({_ARGUMENTS}, str arithmetic, str backend='auto') -> Tensor")
_library.define(f"grouped_swiglu_keeping({_ARGUMENTS}, str arithmetic, str backend) -> (Tensor, Tensor)")
_library.define(
    f"grouped_swiglu_backward(Tensor grad_y, {_ARGUMENTS}, Tensor hidden, bool[] needs, str arithmetic, str backend) "
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
