"""The torch operators `torch.ops.moecomm.*`: dispatch, combine and their adjoints, for autograd and torch.compile.

    operator          forward                            adjoint
    dispatch          rows to their experts              combine (of rows, and of the weights' gradients)
    dispatch_cached   the same with a known routing      combine
    combine           experts' rows home, summed         dispatch_cached; weighted: combine_adjoint
    combine_adjoint   gradients of a weighted combine    (not differentiable)

Operators take tensors and numbers only, so a handle travels as its tensors (`routes`, `topk_idx`, `counts`, `stamp`)
and a communicator as its id. A handle's `layout` is followed by `:capacity` where its shape is fixed. `call` is the
number of a call that has begun already, or -1. Outputs that do not exist (no weights, no local ids) are empty tensors.
`expected` is the stamp of the forward's routing; it differs from `stamp` if a recompute has routed differently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moecomm.algorithms.base import Arrival, Returned
from moecomm.exchanger import Exchanger, find_exchanger
from moecomm.handle import Handle
from moecomm.kernels.base import weights_dtype
from moecomm.kernels.registry import kernels_for

__all__: list[str] = []

_HANDLE = "Tensor routes, Tensor topk_idx, Tensor counts, Tensor stamp, str layout, int expert_alignment, int comm"

_library: Any = torch.library.Library("moecomm", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "dispatch(Tensor x, Tensor topk_idx, Tensor? topk_weights, int comm, str mode, str layout, int expert_alignment, "
    "int call) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    f"dispatch_cached(Tensor x, Tensor? topk_weights, {_HANDLE}, SymInt num_rows, int call, Tensor? expected=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    f"combine(Tensor y, Tensor? topk_weights, Tensor? values, {_HANDLE}, int call, Tensor? expected=None) "
    "-> (Tensor, Tensor)"
)
_library.define(
    f"combine_adjoint(Tensor grad, Tensor y, Tensor topk_weights, {_HANDLE}, Tensor expected) -> (Tensor, Tensor)"
)


# -- CPU ---------------------------------------------------------------------------------------------------------------


def _handle(exchanger: Exchanger, num_rows: int, *parts: Any) -> Handle:
    routes, topk_idx, counts, stamp, form, expert_alignment = parts
    layout, _, capacity = form.partition(":")
    return Handle(routes, topk_idx, counts, stamp, layout, expert_alignment, num_rows, exchanger.id, int(capacity or 0))


def _arrival(exchanger: Exchanger, arrival: Arrival) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x = arrival.x
    weights = x.new_empty(0, dtype=weights_dtype(x.dtype)) if arrival.topk_weights is None else arrival.topk_weights
    local_idx = x.new_empty(0, dtype=torch.int32) if arrival.topk_idx is None else arrival.topk_idx
    return x, weights, local_idx, arrival.num_tokens_per_expert, arrival.offsets


def _dispatch_cpu(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    comm: int,
    mode: str,
    layout: Any,
    expert_alignment: int,
    call: int,
) -> tuple[Tensor, ...]:
    exchanger = find_exchanger(comm)
    begun = (
        exchanger.begin_dispatch(x, topk_idx, topk_weights, mode, layout, expert_alignment, None, make_room=True)
        if call < 0
        else exchanger.take(call)
    )
    arrival: Arrival = exchanger.finish(begun)
    routing = arrival.routing
    assert routing.routes is not None and routing.counts is not None and routing.stamp is not None  # noqa: PT018
    return *_arrival(exchanger, arrival), routing.routes, routing.topk_idx, routing.counts, routing.stamp


def _dispatch_cached_cpu(
    x: Tensor,
    topk_weights: Tensor | None,
    routes: Tensor,
    topk_idx: Tensor,
    counts: Tensor,
    stamp: Tensor,
    layout: Any,
    expert_alignment: int,
    comm: int,
    num_rows: int,
    call: int,
    expected: Tensor | None = None,
) -> tuple[Tensor, ...]:
    exchanger = find_exchanger(comm)
    handle = _handle(exchanger, num_rows, routes, topk_idx, counts, stamp, layout, expert_alignment)
    if expected is not None:
        exchanger.check_same_routing(expected, handle)
    begun = (
        exchanger.begin_dispatch(x, None, topk_weights, "throughput", layout, expert_alignment, handle, make_room=True)
        if call < 0
        else exchanger.take(call)
    )
    return _arrival(exchanger, exchanger.finish(begun))


def _combine_cpu(
    y: Tensor,
    topk_weights: Tensor | None,
    values: Tensor | None,
    routes: Tensor,
    topk_idx: Tensor,
    counts: Tensor,
    stamp: Tensor,
    layout: Any,
    expert_alignment: int,
    comm: int,
    call: int,
    expected: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    exchanger = find_exchanger(comm)
    handle = _handle(exchanger, y.shape[0], routes, topk_idx, counts, stamp, layout, expert_alignment)
    if expected is not None:
        exchanger.check_same_routing(expected, handle)
    if values is not None:
        returned = exchanger.combine_with_values(y, values, handle)
        assert returned.values is not None
        return returned.x, returned.values
    begun = exchanger.begin_combine(y, handle, topk_weights, make_room=True) if call < 0 else exchanger.take(call)
    result: Returned = exchanger.finish(begun)
    return result.x, y.new_empty(0, dtype=weights_dtype(y.dtype))


def _combine_adjoint_cpu(
    grad: Tensor,
    y: Tensor,
    topk_weights: Tensor,
    routes: Tensor,
    topk_idx: Tensor,
    counts: Tensor,
    stamp: Tensor,
    layout: Any,
    expert_alignment: int,
    comm: int,
    expected: Tensor,
) -> tuple[Tensor, Tensor]:
    exchanger = find_exchanger(comm)
    handle = _handle(exchanger, y.shape[0], routes, topk_idx, counts, stamp, layout, expert_alignment)
    exchanger.check_same_routing(expected, handle)
    # The gradient's rows and the weights meet the experts' outputs where those are; one value per route comes home.
    call = exchanger.begin_dispatch(
        grad, None, topk_weights, "throughput", layout, expert_alignment, handle, make_room=True
    )
    arrival: Arrival = exchanger.finish(call)
    assert arrival.topk_weights is not None
    grad_y, grad_rows = kernels_for("cpu").scale_dot(arrival.x, y.contiguous(), arrival.topk_weights)
    return grad_y, exchanger.return_values(grad_rows, handle)


# -- shapes for torch.compile ------------------------------------------------------------------------------------------


def _dispatch_fake(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    comm: int,
    mode: str,
    layout: str,
    expert_alignment: int,
    call: int,
) -> tuple[Tensor, ...]:
    capacity = find_exchanger(comm).capacity(mode, layout, expert_alignment)
    per_expert = find_exchanger(comm).num_local_experts if layout == "slab" else 1
    num_rows = capacity * per_expert if capacity else torch.library.get_ctx().new_dynamic_size()
    counts_shape = find_exchanger(comm).counts_shape
    arrived = _arrival_fake(x, topk_weights, topk_idx.shape[1], layout, num_rows, find_exchanger(comm))
    routes = topk_idx.new_empty(topk_idx.shape, dtype=torch.int64)
    return (
        *arrived,
        routes,
        topk_idx.new_empty(topk_idx.shape, dtype=torch.int32),
        topk_idx.new_empty(counts_shape, dtype=torch.int32),
        topk_idx.new_empty(2, dtype=torch.int64),
    )


def _arrival_fake(
    x: Tensor, topk_weights: Tensor | None, num_topk: int, layout: str, num_rows: Any, exchanger: Exchanger
) -> tuple[Tensor, ...]:
    flat = layout == "flat"
    rows: tuple[Any, ...] = (num_rows, num_topk) if flat else (num_rows,)
    num_local = exchanger.num_local_experts
    return (
        x.new_empty((num_rows, x.shape[1])),
        x.new_empty(0 if topk_weights is None else rows, dtype=weights_dtype(x.dtype)),
        x.new_empty((num_rows, num_topk) if flat else 0, dtype=torch.int32),
        x.new_empty(num_local, dtype=torch.int32),
        x.new_empty(num_local, dtype=torch.int32),
    )


def _dispatch_cached_fake(
    x: Tensor,
    topk_weights: Tensor | None,
    routes: Tensor,
    topk_idx: Tensor,
    counts: Tensor,
    stamp: Tensor,
    layout: str,
    expert_alignment: int,
    comm: int,
    num_rows: int,
    call: int,
    expected: Tensor | None = None,
) -> tuple[Tensor, ...]:
    return _arrival_fake(x, topk_weights, routes.shape[1], layout, num_rows, find_exchanger(comm))


def _combine_fake(
    y: Tensor,
    topk_weights: Tensor | None,
    values: Tensor | None,
    routes: Tensor,
    *handle: Any,
    expected: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    home = y.new_empty((routes.shape[0], y.shape[1]))
    return home, y.new_empty(0 if values is None else routes.shape, dtype=weights_dtype(y.dtype))


def _combine_adjoint_fake(
    grad: Tensor, y: Tensor, topk_weights: Tensor, routes: Tensor, *handle: Any
) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), y.new_empty(routes.shape, dtype=weights_dtype(y.dtype))


for _name, _cpu, _fake in (
    ("dispatch", _dispatch_cpu, _dispatch_fake),
    ("dispatch_cached", _dispatch_cached_cpu, _dispatch_cached_fake),
    ("combine", _combine_cpu, _combine_fake),
    ("combine_adjoint", _combine_adjoint_cpu, _combine_adjoint_fake),
):
    _library.impl(_name, _cpu, "CPU")
    torch.library.register_fake(f"moecomm::{_name}", _fake, lib=_library)
