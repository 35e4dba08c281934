"""The torch operators `torch.ops.moecomm.*`: dispatch, combine and their adjoints, for torch.compile and all else that
looks at operators; where nothing does, `Communicator` goes past them.

    operator          forward                            adjoint
    dispatch          rows to their experts              combine (of rows, and of the weights' gradients)
    dispatch_cached   the same with a known routing      combine
    combine           experts' rows home, summed         dispatch_cached; weighted: combine_adjoint
    combine_adjoint   gradients of a weighted combine    (not differentiable)

Operators take tensors and numbers only, so a handle travels as its tensors (`routes`, `topk_idx`, `counts`, `stamp`)
and a communicator as its id. `capacity` is that of a `Routing`; of an operator that makes a handle, None = as many as
arrive. Outputs that do not exist (no weights, no local ids) are empty tensors. Shapes follow from the arguments alone,
so that a compiled graph may be kept for other communicators and other processes.

To a compiler they are pure functions: it keeps the order that data dictate, as between the layers of a model. Two
exchanges of one graph that do not need each other, such as those of two halves of a batch, are in program order only
with backends that do not schedule anew (not inductor); compile such halves each by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moecomm.algorithms.base import Arrival
from moecomm.algorithms.plan import Layout
from moecomm.algorithms.routing import Routing
from moecomm.checks import check_capacity, check_layout, check_numbers
from moecomm.exchanger import Exchanger, find_exchanger
from moecomm.gradients import is_recording, record_combine, record_dispatch, spread
from moecomm.handle import Handle, Received, received_of
from moecomm.kernels.base import weights_dtype

__all__ = ["combine", "dispatch"]

_HANDLE = (
    "Tensor routes, Tensor topk_idx, Tensor counts, Tensor stamp, str mode, str layout, int capacity, "
    "int expert_alignment, int comm"
)

_library: Any = torch.library.Library("moecomm", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "dispatch(Tensor x, Tensor topk_idx, Tensor? topk_weights, str mode, str layout, int? capacity, "
    "int expert_alignment, int comm, int num_ranks, int num_experts, int num_local_experts, int num_crossings=0) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    f"dispatch_cached(Tensor x, Tensor? topk_weights, {_HANDLE}, SymInt num_rows, int num_local_experts) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    f'combine(Tensor y, Tensor? topk_weights, Tensor? values, {_HANDLE}, *, str reduce="exact") -> (Tensor, Tensor)'
)
_library.define(f"combine_adjoint(Tensor grad, Tensor y, Tensor topk_weights, {_HANDLE}) -> (Tensor, Tensor)")

_ops = torch.ops.moecomm


def dispatch(
    exchanger: Exchanger,
    x: Tensor,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    mode: str,
    layout: Layout,
    expert_alignment: int,
    capacity: int | None,
    handle: Handle | None,
) -> Received:
    """`Communicator.dispatch` through the operators."""
    if handle is None:
        check_numbers(expert_alignment, capacity)  # whose types an operator would hide
        if capacity is None:
            capacity = exchanger.capacity(mode, layout, expert_alignment) or None
        elif capacity == exchanger.capacity(mode, layout, expert_alignment) > 0:
            check_layout(layout, expert_alignment, mode, capacity)  # the operator could not tell that somebody gave it
        how = (mode, layout, capacity, expert_alignment, exchanger.id)
        outputs = _ops.dispatch(x, topk_idx, topk_weights, *how, *exchanger.sizes)
        rows, weights, local_idx, num_tokens_per_expert, offsets, routes, idx, counts, stamp = outputs
        num_rows = rows.shape[0]
        routing = Routing(idx, layout, expert_alignment, routes, counts, stamp, capacity or 0, mode=mode)
        handle = Handle(routing, num_rows, exchanger.id)
    else:
        if capacity is not None:
            check_capacity(capacity, handle)
        sizes = (handle.num_rows, exchanger.num_local_experts)
        outputs = _ops.dispatch_cached(x, topk_weights, *spread(handle), *sizes)
        rows, weights, local_idx, num_tokens_per_expert, offsets = outputs
    return received_of(
        rows,
        None if topk_weights is None else weights,
        local_idx if handle.layout == "flat" else None,
        num_tokens_per_expert,
        offsets,
        handle,
    )


def combine(y: Tensor, handle: Handle, topk_weights: Tensor | None, reduce: str) -> Tensor:
    """`Communicator.combine` through the operators."""
    sums: Tensor
    sums, _ = _ops.combine(y, topk_weights, None, *spread(handle), reduce=reduce)
    return sums


# -- eagerly --------------------------------------------------------------------------------------------------------


def _handle(num_rows: int, *parts: Any) -> Handle:
    routes, topk_idx, counts, stamp, mode, layout, capacity, expert_alignment, comm = parts
    routing = Routing(topk_idx, layout, expert_alignment, routes, counts, stamp, capacity, mode=mode)
    return Handle(routing, num_rows, comm)


def _outputs(exchanger: Exchanger, arrival: Arrival) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, weights = arrival.flat()
    exchanger.session.distrust(x)  # compiled code may write to what operators gave, and tells nobody
    weights = x.new_empty(0, dtype=weights_dtype(x.dtype)) if weights is None else weights
    local_idx = x.new_empty(0, dtype=torch.int32) if arrival.topk_idx is None else arrival.topk_idx
    tokens = arrival.num_tokens_per_expert
    return x, weights, local_idx, tokens, torch.zeros_like(tokens) if arrival.offsets is None else arrival.offsets


def _dispatch_now(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    mode: str,
    layout: Layout,
    capacity: int | None,
    expert_alignment: int,
    *rest: int,
) -> tuple[Tensor, ...]:
    exchanger = find_exchanger(rest[0])
    if capacity and capacity == exchanger.capacity(mode, layout, expert_alignment):
        capacity = None  # low latency: what it always is, which nobody has given
    arguments = (x, topk_idx, topk_weights, mode, layout, expert_alignment, capacity, None)
    arrival: Arrival = exchanger.finish(exchanger.begin_dispatch(*arguments, make_room=True, is_hosted=True))
    handle = exchanger.handle(arrival)
    exchanger.remember(handle)
    return *_outputs(exchanger, arrival), handle.routes, handle.topk_idx, handle.counts, handle.stamp


def _dispatch_cached_now(x: Tensor, topk_weights: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    *parts, num_rows, _ = rest
    handle = _handle(num_rows, *parts)
    exchanger = find_exchanger(handle.communicator)
    return _outputs(exchanger, exchanger.dispatch_again(x, topk_weights, handle))


def _combine_now(
    y: Tensor, topk_weights: Tensor | None, values: Tensor | None, *parts: Any, reduce: str = "exact"
) -> tuple[Tensor, Tensor]:
    handle = _handle(y.shape[0], *parts)
    # Compiled code uses memory again as soon as an operator has returned.
    exchanger = find_exchanger(handle.communicator)
    returned = exchanger.combine(y, handle, topk_weights, values=values, may_change=True, reduce=reduce)
    home = y.new_empty(0, dtype=weights_dtype(y.dtype)) if returned.values is None else returned.values
    return returned.x, home


def _combine_adjoint_now(grad: Tensor, y: Tensor, topk_weights: Tensor, *parts: Any) -> tuple[Tensor, Tensor]:
    handle = _handle(y.shape[0], *parts)
    return find_exchanger(handle.communicator).weighted_adjoint(grad, y, topk_weights, handle)


# -- shapes, for tracing -------------------------------------------------------------------------------------------


def _dispatch_fake(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    mode: str,
    layout: Layout,
    capacity: int | None,
    expert_alignment: int,
    comm: int,
    num_ranks: int,
    num_experts: int,
    num_local_experts: int,
    num_crossings: int = 0,
) -> tuple[Tensor, ...]:
    per_expert = num_local_experts if layout == "slab" else 1
    # A capacity below 1 is refused when the operator runs, where the peers learn of it.
    num_rows = capacity * per_expert if capacity and capacity > 0 else torch.library.get_ctx().new_dynamic_size()
    return (
        *_outputs_fake(x, topk_weights, topk_idx.shape[1], layout, num_rows, num_local_experts),
        topk_idx.new_empty(topk_idx.shape, dtype=torch.int64),
        topk_idx.new_empty(topk_idx.shape, dtype=torch.int32),
        # What the host knows stays there.
        topk_idx.new_empty((num_ranks, num_experts + num_ranks), dtype=torch.int32, device="cpu"),
        topk_idx.new_empty(2 + num_crossings, dtype=torch.int64, device="cpu"),
    )


def _outputs_fake(
    x: Tensor, topk_weights: Tensor | None, num_topk: int, layout: str, num_rows: Any, num_local_experts: int
) -> tuple[Tensor, ...]:
    flat = layout == "flat"
    rows: tuple[Any, ...] = (num_rows, num_topk) if flat else (num_rows,)
    return (
        x.new_empty((num_rows, x.shape[1])),
        x.new_empty(0 if topk_weights is None else rows, dtype=weights_dtype(x.dtype)),
        x.new_empty((num_rows, num_topk) if flat else 0, dtype=torch.int32),
        x.new_empty(num_local_experts, dtype=torch.int32),
        x.new_empty(num_local_experts, dtype=torch.int32),
    )


def _dispatch_cached_fake(x: Tensor, topk_weights: Tensor | None, routes: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_, layout, _, _, _, num_rows, num_local_experts = rest
    return _outputs_fake(x, topk_weights, routes.shape[1], layout, num_rows, num_local_experts)


def _combine_fake(
    y: Tensor, topk_weights: Tensor | None, values: Tensor | None, routes: Tensor, *rest: Any, reduce: str = "exact"
) -> tuple[Tensor, Tensor]:
    home = 0 if values is None else routes.shape
    return y.new_empty((routes.shape[0], y.shape[1])), y.new_empty(home, dtype=weights_dtype(y.dtype))


def _combine_adjoint_fake(
    grad: Tensor, y: Tensor, topk_weights: Tensor, routes: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), y.new_empty(routes.shape, dtype=weights_dtype(y.dtype))


# -- autograd ------------------------------------------------------------------------------------------------------


def _below_autograd(operator: Any, *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    with torch._C._AutoDispatchBelowAutograd():
        outputs: tuple[Tensor, ...] = operator(*arguments, **options)
    return outputs


def _dispatch_autograd(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    mode: str,
    layout: Layout,
    capacity: int | None,
    *rest: int,
) -> tuple[Tensor, ...]:
    outputs = _below_autograd(_ops.dispatch, x, topk_idx, topk_weights, mode, layout, capacity, *rest)
    handle = _handle(outputs[0].shape[0], *outputs[5:], mode, layout, capacity or 0, *rest[:2])
    return _recorded_dispatch(x, topk_weights, outputs, handle)


def _dispatch_cached_autograd(x: Tensor, topk_weights: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    outputs = _below_autograd(_ops.dispatch_cached, x, topk_weights, *rest)
    *parts, num_rows, _ = rest
    return _recorded_dispatch(x, topk_weights, outputs, _handle(num_rows, *parts))


def _recorded_dispatch(
    x: Tensor, topk_weights: Tensor | None, outputs: tuple[Tensor, ...], handle: Handle
) -> tuple[Tensor, ...]:
    if not is_recording(x, topk_weights):
        return outputs
    rows, empty, *others = outputs
    rows, weights = record_dispatch(x, topk_weights, rows, None if topk_weights is None else empty, handle)
    return rows, empty if weights is None else weights, *others


def _combine_autograd(
    y: Tensor, topk_weights: Tensor | None, values: Tensor | None, *parts: Any, reduce: str = "exact"
) -> tuple[Tensor, ...]:
    outputs = _below_autograd(_ops.combine, y, topk_weights, values, *parts, reduce=reduce)
    if not is_recording(y, topk_weights, values):
        return outputs
    sums, empty = outputs
    handle = _handle(y.shape[0], *parts)
    sums, home = record_combine(y, topk_weights, values, sums, None if values is None else empty, handle)
    return sums, empty if home is None else home


class _CombineAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        return _below_autograd(_ops.combine_adjoint, *arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("the operator moecomm::combine_adjoint cannot be differentiated again")


def _combine_adjoint_autograd(*arguments: Any) -> Any:
    return _CombineAdjoint.apply(*arguments)  # type: ignore[no-untyped-call]


for _name, _now, _fake, _autograd in (
    ("dispatch", _dispatch_now, _dispatch_fake, _dispatch_autograd),
    ("dispatch_cached", _dispatch_cached_now, _dispatch_cached_fake, _dispatch_cached_autograd),
    ("combine", _combine_now, _combine_fake, _combine_autograd),
    ("combine_adjoint", _combine_adjoint_now, _combine_adjoint_fake, _combine_adjoint_autograd),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _now, _key)
    _library.impl(_name, _autograd, "Autograd")
    torch.library.register_fake(f"moecomm::{_name}", _fake, lib=_library)
