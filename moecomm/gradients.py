"""Gradients of the torch operators: the adjoint of dispatch is combine, and the reverse; no counts travel again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import moecomm.functional as functional
from moecomm.exchanger import find_exchanger
from moecomm.handle import form_of

__all__: list[str] = []

_ops = torch.ops.moecomm

# The handle's tensors, its layout and alignment, and the communicator.
_NUM_HANDLE_ARGUMENTS = 7


def _below_autograd(operator: Any, *arguments: Any) -> tuple[Tensor, ...]:
    with torch._C._AutoDispatchBelowAutograd():
        outputs: tuple[Tensor, ...] = operator(*arguments)
    return outputs


def _home(ctx: Any, grad_x: Tensor, grad_weights: Tensor) -> tuple[Tensor, Tensor | None]:
    """The adjoint of both dispatches: gradients of received rows and weights, home and summed.

    Every rank takes part whatever it needs itself: a rank that stayed away would leave the others waiting.
    """
    handle = (*ctx.saved_tensors, *ctx.options)
    values = grad_weights if ctx.weighted else None
    grad_x, grad_values = _ops.combine(grad_x, None, values, *handle, -1, ctx.stamp)
    return grad_x, grad_values if ctx.weighted else None


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, topk_weights: Tensor | None, topk_idx: Tensor, *options: Any) -> Any:
        comm, mode, layout, expert_alignment, _ = options
        outputs = _below_autograd(_ops.dispatch, x, topk_idx, topk_weights, *options)
        handle = outputs[5:]
        ctx.save_for_backward(*handle)
        # Not among the saved tensors, which a recompute replaces: this stays what the forward saw.
        ctx.stamp = handle[-1].clone()
        capacity = find_exchanger(comm).capacity(mode, layout, expert_alignment)
        ctx.options = (form_of(layout, capacity), expert_alignment, comm)
        ctx.weighted = topk_weights is not None
        ctx.mark_non_differentiable(*outputs[2:])
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad_weights: Tensor, *unused: Any) -> Any:
        grads = _home(ctx, grad_x, grad_weights)
        return (*grads, None, None, None, None, None, None)


class _DispatchCached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, topk_weights: Tensor | None, *rest: Any) -> Any:
        outputs = _below_autograd(_ops.dispatch_cached, x, topk_weights, *rest)
        *handle, layout, expert_alignment, comm = rest[:_NUM_HANDLE_ARGUMENTS]
        ctx.save_for_backward(*handle)
        ctx.stamp = handle[-1].clone()
        ctx.options = (layout, expert_alignment, comm)
        ctx.weighted = topk_weights is not None
        ctx.num_rest = len(rest)
        ctx.mark_non_differentiable(*outputs[2:])
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad_weights: Tensor, *unused: Any) -> Any:
        return (*_home(ctx, grad_x, grad_weights), *(None,) * ctx.num_rest)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, topk_weights: Tensor | None, values: Tensor | None, *rest: Any) -> Any:
        outputs = _below_autograd(_ops.combine, y, topk_weights, values, *rest)
        *handle, layout, expert_alignment, comm = rest[:_NUM_HANDLE_ARGUMENTS]
        ctx.weighted = topk_weights is not None
        ctx.valued = values is not None
        # The experts' outputs are needed only for the gradient of the weights.
        ctx.save_for_backward(*handle, *((y, topk_weights) if ctx.weighted else ()))
        ctx.stamp = handle[-1].clone()
        ctx.options = (layout, expert_alignment, comm)
        ctx.num_rows = y.shape[0]
        ctx.num_rest = len(rest)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_values: Tensor) -> Any:
        saved = ctx.saved_tensors  # once: under activation checkpointing a second look is an error
        handle = (*saved[:4], *ctx.options)
        nothing = (None,) * ctx.num_rest
        if ctx.weighted:
            y, topk_weights = saved[4:]
            grad_y, grad_weights = _ops.combine_adjoint(grad, y, topk_weights, *handle, ctx.stamp)
            return grad_y, grad_weights, None, *nothing
        values = grad_values if ctx.valued else None
        grad_y, back, *_ = _ops.dispatch_cached(grad, values, *handle, ctx.num_rows, -1, ctx.stamp)
        return grad_y, None, back if ctx.valued else None, *nothing


class _CombineAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        return _below_autograd(_ops.combine_adjoint, *arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("the gradient of a weighted combine cannot be differentiated again")


def _applied(function: Any) -> Callable[..., Any]:
    """The operator's autograd implementation; torch's `apply` has no annotations."""

    def apply(*arguments: Any) -> Any:
        return function.apply(*arguments)

    return apply


def _dispatch(x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, *options: Any) -> Any:
    return _applied(_Dispatch)(x, topk_weights, topk_idx, *options)


for _name, _implementation in (
    ("dispatch", _dispatch),
    ("dispatch_cached", _applied(_DispatchCached)),
    ("combine", _applied(_Combine)),
    ("combine_adjoint", _applied(_CombineAdjoint)),
):
    functional._library.impl(_name, _implementation, "Autograd")
