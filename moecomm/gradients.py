"""Dispatch and combine with gradients: the adjoint of dispatch is combine, and the reverse; no counts travel again.

    exchange            its adjoint
    dispatch            combine, which also brings the gradients of travelling weights home
    combine             dispatch with the same handle
    combine, weighted   dispatch of gradients and weights, products with the experts' outputs, those of weights home

An exchange is made first and recorded afterwards, on every rank if on any: `record_dispatch` and `record_combine` make
what it gave a function of what it got. Every rank then takes part in the backward whatever it needs itself, since the
others would wait for it. Adjoints are exchanges like any other, so they can be differentiated again.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from moecomm.algorithms.signature import Operation
from moecomm.checks import SUMMABLE
from moecomm.errors import CommunicatorClosed, MoecommError
from moecomm.exchanger import find_exchanger
from moecomm.handle import Handle

__all__ = ["is_recording", "is_traced", "record_combine", "record_dispatch", "spread"]

_ops = torch.ops.moecomm


def is_traced() -> bool:
    """Whether something looks at torch operators: torch.compile, or a dispatch mode (selective checkpointing, ...)."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def is_recording(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is done with these."""
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def spread(handle: Handle) -> tuple[Tensor, Tensor, Tensor, Tensor, str, str, int, int, int]:
    """A handle as the torch operators take it."""
    return (
        handle.routes,
        handle.topk_idx,
        handle.counts,
        handle.stamp,
        handle.mode,
        handle.layout,
        handle.capacity,
        handle.expert_alignment,
        handle.communicator,
    )


def record_dispatch(
    x: Tensor, topk_weights: Tensor | None, rows: Tensor, weights: Tensor | None, handle: Handle
) -> tuple[Tensor, Tensor | None]:
    """Makes the rows and weights that a dispatch brought functions of those sent."""
    anchor = _anchor(x, topk_weights)
    recorded: tuple[Tensor, Tensor | None]
    recorded = _Dispatch.apply(x, topk_weights, anchor, (rows, weights), handle)  # type: ignore[no-untyped-call]
    return recorded


def record_combine(
    y: Tensor, topk_weights: Tensor | None, values: Tensor | None, sums: Tensor, home: Tensor | None, handle: Handle
) -> tuple[Tensor, Tensor | None]:
    """Makes the sums and values that a combine brought home functions of the rows, weights and values it got."""
    anchor = _anchor(y, topk_weights, values)
    recorded: tuple[Tensor, Tensor | None]
    recorded = _Combine.apply(y, topk_weights, values, anchor, (sums, home), handle)  # type: ignore[no-untyped-call]
    return recorded


def _anchor(*inputs: Tensor | None) -> Tensor | None:
    """A tensor whose gradient nobody wants, for a rank that has no input with a gradient but peers that have."""
    return None if is_recording(*inputs) else torch.empty(0, requires_grad=True)


# The results are handed to `forward` in a tuple, where autograd does not take them for inputs. `ctx.handle` is that of
# the forward for good; what is saved, a recompute under activation checkpointing replaces.


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, topk_weights: Tensor | None, anchor: Tensor | None, arrived: Any, handle: Handle
    ) -> Any:
        ctx.handle = handle
        ctx.is_weighted = topk_weights is not None
        ctx.is_summable = x.dtype in SUMMABLE
        ctx.save_for_backward(handle.token)
        if not ctx.is_summable:
            ctx.mark_non_differentiable(arrived[0])
        return arrived

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor | None) -> Any:
        handle, _ = _recall(ctx, Operation.COMBINE)
        values = grad_weights if ctx.is_weighted else None
        if not ctx.is_summable:
            assert values is not None
            grad_rows = values.new_empty((handle.num_rows, 0))  # rows of bytes have no gradients
        grad_x, home = _combine(grad_rows, values, handle)
        return grad_x if ctx.is_summable else None, home, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        topk_weights: Tensor | None,
        values: Tensor | None,
        anchor: Tensor | None,
        returned: Any,
        handle: Handle,
    ) -> Any:
        ctx.handle = handle
        ctx.is_valued = values is not None
        # The experts' outputs are needed only for the gradients of weights.
        ctx.save_for_backward(handle.token, *(() if topk_weights is None else (y, topk_weights)))
        return returned

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_home: Tensor | None) -> Any:
        handle, saved = _recall(ctx, Operation.CACHED_DISPATCH)
        if saved:
            y, topk_weights = saved
            return *_weighted_adjoint(grad, y, topk_weights, handle), None, None, None, None
        grad_y, grad_values = _dispatch(grad, grad_home if ctx.is_valued else None, handle)
        return _apart(grad_y, handle), None, _apart(grad_values, handle), None, None, None


def _apart(grad: Tensor | None, handle: Handle) -> Tensor | None:
    """The same gradient, to which autograd adds no others in place: a second tensor refers to its memory.

    Of a fixed shape, rows that no route fills must stay zero; in a graph nobody would notice who writes to them.
    """
    return grad.view_as(grad) if grad is not None and handle.capacity else grad


def _recall(ctx: Any, operation: Operation) -> tuple[Handle, tuple[Tensor, ...]]:
    """The handle, and the saved tensors, once it is certain that they are of the forward's routing.

    If they are not, or if there are none, the peers learn that this rank has no part in the exchange to come. Where the
    device finds out, all ranks do in that exchange, of which nothing comes then.

    Raises:
        RoutingChanged: a recompute has routed differently.
    """
    handle: Handle = ctx.handle
    try:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
    except MoecommError:
        raise  # from an exchange of a recompute: the peers know
    except Exception as error:
        with contextlib.suppress(CommunicatorClosed):
            find_exchanger(handle.communicator).give_up(handle, operation, error)
        raise
    if saved[0] is not handle.token and not is_traced():
        handle = find_exchanger(handle.communicator).confirm(handle, saved[0], operation)
    return handle, saved[1:]


def _combine(y: Tensor, values: Tensor | None, handle: Handle) -> tuple[Tensor, Tensor | None]:
    if is_traced():
        sums, home = _ops.combine(y, None, values, *spread(handle))
        return sums, None if values is None else home
    returned = find_exchanger(handle.communicator).combine(y, handle, values=values)
    if not is_recording(y, values):
        return returned.x, returned.values
    return record_combine(y, None, values, returned.x, returned.values, handle)


def _dispatch(x: Tensor, topk_weights: Tensor | None, handle: Handle) -> tuple[Tensor, Tensor | None]:
    if is_traced():
        sizes = (handle.num_rows, find_exchanger(handle.communicator).num_local_experts)
        rows, weights, *_ = _ops.dispatch_cached(x, topk_weights, *spread(handle), *sizes)
        return rows, None if topk_weights is None else weights
    arrival = find_exchanger(handle.communicator).dispatch_again(x, topk_weights, handle)
    if not is_recording(x, topk_weights):
        return arrival.flat()
    return record_dispatch(x, topk_weights, *arrival.flat(), handle)


def _weighted_adjoint(grad: Tensor, y: Tensor, topk_weights: Tensor, handle: Handle) -> tuple[Tensor, Tensor]:
    """Gradients of a weighted combine's rows and weights."""
    if is_traced():
        grad_y, grad_weights = _ops.combine_adjoint(grad, y, topk_weights, *spread(handle))
        return grad_y, grad_weights
    if not is_recording(grad, y, topk_weights):
        return find_exchanger(handle.communicator).weighted_adjoint(grad, y, topk_weights, handle)
    rows, weights = _dispatch(grad, topk_weights, handle)
    assert weights is not None
    wide = rows.to(weights.dtype)
    products = (wide * y).sum(dim=1)
    _, home = _combine(products.new_empty((handle.num_rows, 0)), products, handle)
    assert home is not None
    return (weights[:, None] * wide).to(y.dtype), home
