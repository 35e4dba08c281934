"""The experts' computation as a torch op: differentiable, traceable, and able to write into given memory.

`moecomm::grouped_swiglu` is what users and compilers see; `..._keeping` and `..._backward` are its halves under
autograd, so that a traced backward is one node too. They are defined by hand, because the decorator for custom ops
costs several times more per call. The parts of `ExpertRows` are their arguments: `ends` is the offsets, or of slabs
(capacity > 0) the rows per expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moecomm.kernels.experts import ExpertKernels, ExpertRows, Gathered
from moecomm.kernels.registry import expert_kernels_for
from moecomm.nn.backends import choose_backend
from moecomm.nn.expert_rows import rows_of
from moecomm.nn.swiglu_loops import LoopExperts

__all__ = ["apply_experts", "grouped_swiglu"]


def grouped_swiglu(
    x: Tensor,
    offsets: Tensor | None,
    gate_up_proj: Tensor,
    *,
    down_proj: Tensor,
    num_tokens_per_expert: Tensor | None = None,
    topk_idx: Tensor | None = None,
    topk_weights: Tensor | None = None,
    out: Tensor | None = None,
    arithmetic: str = "auto",
    row_by_row: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Applies each expert to its rows. Differentiable (once) in `x`, `gate_up_proj`, `down_proj` and `topk_weights`.

    Arguments:
        x: `[N, H]` floating; slab: `[E, capacity, H]`.
        offsets: `[E]` int32 or int64, inclusive prefix sums of the rows per expert; offsets[-1] <= N. None = one of the
            other forms, as in `GroupedExperts.forward`.
        gate_up_proj: `[E, 2I, H]`.
        down_proj: `[E, H, I]`, dtype of `gate_up_proj`, which may differ from that of `x`.
        num_tokens_per_expert: slab: `[E]` int32 or int64, 0 to capacity.
        topk_idx: flat: `[N, K]` int32 or int64, -1 = none.
        topk_weights: flat: `[N, K]` float32 or float64; None = 1.
        out: like `x`, contiguous, dtype of `x`; the last step writes into it. None = new memory.
        arithmetic: "auto", "native" or "float32", see `compute_dtype`.
        row_by_row: multiply each row by itself, so that its bits do not depend on the others. Without gradients only,
            and always by "loops".
        backend: "auto", "loops", "torch" or "triton", see `moecomm.nn.backends`. All but "loops" trust `offsets`.

    Returns:
        Like `x`; in the memory of `out` if given. Rows that are padding or beyond offsets[-1] are zero; in `out` they
        are left as they are.

    Raises:
        ValueError: shapes or offsets that do not fit together; `row_by_row` with gradients or within a compiler; a
            backend that cannot serve such tensors.
    """
    rows = rows_of(
        x,
        gate_up_proj.shape[0],
        offsets=offsets,
        num_tokens_per_expert=num_tokens_per_expert,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
    )
    return apply_experts(
        x,
        rows,
        gate_up_proj,
        down_proj=down_proj,
        out=out,
        arithmetic=arithmetic,
        row_by_row=row_by_row,
        backend=backend,
    )


def apply_experts(
    x: Tensor,
    rows: ExpertRows,
    gate_up_proj: Tensor,
    *,
    down_proj: Tensor,
    out: Tensor | None,
    arithmetic: str,
    row_by_row: bool,
    backend: str,
) -> Tensor:
    """As `grouped_swiglu`; `rows` says which are whose."""
    if x.dim() == 3:
        flat = None if out is None else out.flatten(0, 1)
        options: dict[str, Any] = {"arithmetic": arithmetic, "row_by_row": row_by_row, "backend": backend}
        y = apply_experts(x.flatten(0, 1), rows, gate_up_proj, down_proj=down_proj, out=flat, **options)
        return y.view(x.shape)
    if row_by_row:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            raise ValueError("row_by_row must be False where gradients are enabled or a compiler traces, got True")
        loops = LoopExperts(arithmetic, row_by_row=True)
        given = None if out is None else out.detach()
        return loops.outputs(x.contiguous(), rows, gate_up_proj, down_proj, out=given, keeps_hidden=False)[0]
    arguments = _arguments_of(x, rows, gate_up_proj, down_proj, arithmetic, backend)
    if out is None:
        return torch.ops.moecomm.grouped_swiglu(*arguments)  # type: ignore[no-any-return]
    if torch.compiler.is_compiling():
        # A compiler plans the memory itself; the copy it makes of this is its own business.
        return out.copy_(torch.ops.moecomm.grouped_swiglu(*arguments))
    if not torch.is_grad_enabled():
        return _outputs(*arguments, out=out.detach(), keeps_hidden=False)[0]
    return _GroupedSwiglu.apply(*arguments, out)  # type: ignore[no-any-return, no-untyped-call]


def _arguments_of(
    x: Tensor, rows: ExpertRows, gate_up_proj: Tensor, down_proj: Tensor, arithmetic: str, backend: str
) -> tuple[Any, ...]:
    """What the ops take, in their order."""
    is_slab = rows.offsets is None
    ends = rows.num_tokens_per_expert if is_slab else rows.offsets
    routes, row_idx = (None, None) if rows.gathered is None else (rows.gathered.routes, rows.gathered.row_idx)
    return x, ends, gate_up_proj, down_proj, arithmetic, backend, is_slab, rows.row_weights, routes, row_idx


def _rows_of(
    x: Tensor, ends: Tensor, is_slab: bool, row_weights: Tensor | None, routes: Tensor | None, row_idx: Tensor | None
) -> ExpertRows:
    """The reverse."""
    if is_slab:
        return ExpertRows(x.shape[0], None, ends, x.shape[0] // max(1, ends.shape[0]))
    if routes is None or row_idx is None:
        return ExpertRows(x.shape[0], ends, row_weights=row_weights)
    return ExpertRows(row_idx.shape[0], ends, gathered=Gathered(row_idx, routes), row_weights=row_weights)


def _outputs(
    x: Tensor,
    ends: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    arithmetic: str,
    backend: str,
    is_slab: bool,
    row_weights: Tensor | None,
    routes: Tensor | None,
    row_idx: Tensor | None,
    *,
    out: Tensor | None,
    keeps_hidden: bool,
) -> tuple[Tensor, Tensor | None]:
    """The outputs, and gate and up if they are kept. Rows of a given `out` that are nobody's are not worth clearing."""
    x = x.contiguous()
    rows = _rows_of(x, ends, is_slab, row_weights, routes, row_idx)
    chosen = choose_backend(backend, x, rows, gate_up_proj, down_proj=down_proj, trains=keeps_hidden)
    return _kernels_for(chosen, arithmetic).outputs(
        x, rows, gate_up_proj, down_proj, out=out, keeps_hidden=keeps_hidden
    )


def _kernels_for(backend: str, arithmetic: str) -> ExpertKernels:
    return LoopExperts(arithmetic) if backend == "loops" else expert_kernels_for(backend)


def _op_forward(
    x: Tensor,
    ends: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    arithmetic: str,
    backend: str = "auto",
    is_slab: bool = False,
    row_weights: Tensor | None = None,
    routes: Tensor | None = None,
    row_idx: Tensor | None = None,
) -> Tensor:
    arguments = (x, ends, gate_up_proj, down_proj, arithmetic, backend, is_slab, row_weights, routes, row_idx)
    return _outputs(*arguments, out=None, keeps_hidden=False)[0]


def _op_forward_keeping(*arguments: Any) -> tuple[Tensor, Tensor]:
    y, hidden = _outputs(*arguments, out=None, keeps_hidden=True)
    assert hidden is not None
    return y, hidden


def _op_backward(
    grad_y: Tensor,
    x: Tensor,
    ends: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    hidden: Tensor,
    needs: list[bool],
    arithmetic: str,
    backend: str,
    is_slab: bool,
    row_weights: Tensor | None,
    routes: Tensor | None,
    row_idx: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.contiguous()
    rows = _rows_of(x, ends, is_slab, row_weights, routes, row_idx)
    chosen = choose_backend(backend, x, rows, gate_up_proj, down_proj=down_proj, trains=True)
    made = _kernels_for(chosen, arithmetic).gradients(
        grad_y.contiguous(),
        x,
        rows,
        gate_up_proj,
        down_proj=down_proj,
        hidden=hidden,
        needs=(needs[0], needs[1], needs[2], needs[3]),
    )
    # A gradient that nobody needs is an empty tensor: an op cannot return None.
    likes = (x, gate_up_proj, down_proj, x if row_weights is None else row_weights)
    first, second, third, fourth = (
        like.new_empty(0) if grad is None else grad for grad, like in zip(made, likes, strict=True)
    )
    return first, second, third, fourth


def _fake_forward(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake_forward_keeping(
    x: Tensor,
    ends: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    arithmetic: str,
    backend: str,
    is_slab: bool,
    row_weights: Tensor | None,
    routes: Tensor | None,
    row_idx: Tensor | None,
) -> tuple[Tensor, Tensor]:
    num_rows = x.shape[0] if row_idx is None else row_idx.shape[0]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, torch.empty(num_rows, gate_up_proj.shape[1], dtype=x.dtype, device=x.device)


def _fake_backward(
    grad_y: Tensor,
    x: Tensor,
    ends: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    hidden: Tensor,
    needs: list[bool],
    arithmetic: str,
    backend: str,
    is_slab: bool,
    row_weights: Tensor | None,
    routes: Tensor | None,
    row_idx: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    likes = (x, gate_up_proj, down_proj, x if row_weights is None else row_weights)
    first, second, third, fourth = (
        torch.empty(like.shape if need else (0,), dtype=like.dtype, device=x.device)
        for like, need in zip(likes, needs, strict=True)
    )
    return first, second, third, fourth


class _GroupedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ends: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        arithmetic: str,
        backend: str,
        is_slab: bool,
        row_weights: Tensor | None,
        routes: Tensor | None,
        row_idx: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        y: Tensor
        ctx.constants = (arithmetic, backend, is_slab)
        arguments = (x, ends, gate_up_proj, down_proj, *ctx.constants, row_weights, routes, row_idx)
        if out is None:
            y, hidden = torch.ops.moecomm.grouped_swiglu_keeping(*arguments)
        else:
            # Another tensor on the same memory: to autograd the result is new, and `out` stays what it was.
            y, hidden = _outputs(*arguments, out=out.detach(), keeps_hidden=any(ctx.needs_input_grad))
        ctx.save_for_backward(x, ends, gate_up_proj, down_proj, hidden, row_weights, routes, row_idx)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, gate_up_proj, down_proj, hidden, *routing = ctx.saved_tensors
        needs = [ctx.needs_input_grad[place] for place in (0, 2, 3, 7)]
        grads = torch.ops.moecomm.grouped_swiglu_backward(
            grad_y, x, ends, gate_up_proj, down_proj, hidden, needs, *ctx.constants, *routing
        )
        grad_x, grad_gate_up_proj, grad_down_proj, grad_row_weights = (
            grad if need else None for grad, need in zip(grads, needs, strict=True)
        )
        return grad_x, None, grad_gate_up_proj, grad_down_proj, None, None, None, grad_row_weights, None, None, None


def _op_autograd(
    x: Tensor,
    ends: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    arithmetic: str,
    backend: str = "auto",
    is_slab: bool = False,
    row_weights: Tensor | None = None,
    routes: Tensor | None = None,
    row_idx: Tensor | None = None,
) -> Tensor:
    arguments = (x, ends, gate_up_proj, down_proj, arithmetic, backend, is_slab, row_weights, routes, row_idx)
    learned = (x, gate_up_proj, down_proj, row_weights)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in learned):
        return _GroupedSwiglu.apply(*arguments, None)  # type: ignore[no-any-return, no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.moecomm.grouped_swiglu(*arguments)  # type: ignore[no-any-return]


_TENSORS = "Tensor x, Tensor ends, Tensor gate_up_proj, Tensor down_proj"
_library: Any = torch.library.Library("moecomm", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    f"grouped_swiglu({_TENSORS}, str arithmetic, str backend='auto', bool is_slab=False, Tensor? row_weights=None, "
    "Tensor? routes=None, Tensor? row_idx=None) -> Tensor"
)
_ROWS = "bool is_slab, Tensor? row_weights, Tensor? routes, Tensor? row_idx"
_library.define(f"grouped_swiglu_keeping({_TENSORS}, str arithmetic, str backend, {_ROWS}) -> (Tensor, Tensor)")
_library.define(
    f"grouped_swiglu_backward(Tensor grad_y, {_TENSORS}, Tensor hidden, bool[] needs, str arithmetic, str backend, "
    f"{_ROWS}) -> (Tensor, Tensor, Tensor, Tensor)"
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
