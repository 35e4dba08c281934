"""Rows that came once for all experts of a rank: which expert computes which, in what order, and the way back.

    S rows that arrived   K num_topk   E experts of this rank   N = S * K

Row and choice (s, k) becomes one of N rows, grouped by expert and within an expert by s, then k: the canonical order of
EXPERT_MAJOR. Choices of no expert become the rows behind the last offset. All shapes follow from S and K, so nothing
here makes the host wait for a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moecomm.kernels.experts import ExpertKernels, ExpertRows, Gathered
from moecomm.kernels.registry import kernels_for

__all__ = ["copied_gradients", "copied_outputs", "expand_rows", "flat_rows", "sum_rows"]


def flat_rows(topk_idx: Tensor, num_experts: int, topk_weights: Tensor | None = None) -> ExpertRows:
    """Where each choice goes.

    Arguments:
        topk_idx: `[S, K]` int32 or int64, local expert ids, -1 = none. Others are refused on the CPU outside of a
            compiler; where their values cannot be looked at they are taken for -1.
        num_experts: E.
        topk_weights: `[S, K]` float32 or float64, or None = 1; gets gradients.

    Raises:
        ValueError: an id is below -1 or not below E.
    """
    num_sources, num_topk = topk_idx.shape
    ids = topk_idx.reshape(-1)
    if _is_on_host(ids) and ids.numel() > 0 and not torch.compiler.is_compiling():
        lowest, highest = (int(end) for end in ids.aminmax())
        if lowest < -1 or highest >= num_experts:
            raise ValueError(
                f"topk_idx holds {lowest} to {highest}; local ids are 0 to {num_experts - 1}, or -1 = none"
            )
    places = torch.arange(ids.numel(), device=ids.device)
    owners, order = torch.sort(torch.where((ids >= 0) & (ids < num_experts), ids, num_experts), stable=True)
    experts = torch.arange(num_experts, device=ids.device, dtype=owners.dtype)
    offsets = torch.searchsorted(owners, experts, right=True, out_int32=True)
    routes = places.scatter(0, order, torch.where(owners < num_experts, places, -1))
    weights = None if topk_weights is None else topk_weights.reshape(-1).gather(0, order)
    gathered = Gathered(order // max(1, num_topk), routes.view(num_sources, num_topk))
    return ExpertRows(ids.numel(), offsets, gathered=gathered, row_weights=weights)


def _is_on_host(tensor: Tensor) -> bool:
    """Whether native kernels reach it and its values can be looked at."""
    return tensor.device.type == "cpu"


def expand_rows(x: Tensor, gathered: Gathered) -> Tensor:
    """`[N, H]`: row n is row `row_idx[n]` of `x` `[S, H]` contiguous. Rows of nobody are undefined."""
    if not _is_on_host(x):
        return x.index_select(0, gathered.row_idx)
    rows = x.new_empty(gathered.row_idx.numel(), x.shape[1])
    kernels_for("cpu").push_rows(x, gathered.routes, [rows.data_ptr()])
    return rows


def sum_rows(rows: Tensor, gathered: Gathered, *, out: Tensor | None = None) -> Tensor:
    """`[S, H]`: for each row of S the sum of those of `rows` `[N, H]` contiguous that its routes name.

    In ascending k, from zero, in fp32 (fp64), rounded once. It goes into `out`, contiguous, unless None.
    """
    num_sources, num_topk = gathered.routes.shape
    if out is None:
        out = rows.new_empty(num_sources, rows.shape[1])
    if _is_on_host(rows):
        kernels_for("cpu").combine_rows(out, gathered.routes, [rows.data_ptr()])
        return out
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    total = torch.zeros(out.shape, dtype=wide, device=rows.device)
    for k in range(num_topk):
        place = gathered.routes[:, k]
        piece = rows.index_select(0, place.clamp(min=0)).to(wide)
        total += piece.masked_fill_((place < 0).unsqueeze(1), 0)
    return out.copy_(total)


def copied_outputs(
    kernels: ExpertKernels,
    x: Tensor,
    rows: ExpertRows,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    out: Tensor | None,
    keeps_hidden: bool,
) -> tuple[Tensor, Tensor | None]:
    """`ExpertKernels.outputs` of gathered rows by kernels that cannot gather: rows are copied, then added."""
    assert rows.gathered is not None
    copies = expand_rows(x, rows.gathered)
    y, hidden = kernels.outputs(
        copies,
        rows._replace(gathered=None),
        gate_up_proj,
        down_proj,
        out=torch.empty_like(copies),  # given, so that rows of nobody are not cleared
        keeps_hidden=keeps_hidden,
    )
    return sum_rows(y, rows.gathered, out=out), hidden


def copied_gradients(
    kernels: ExpertKernels,
    grad_y: Tensor,
    x: Tensor,
    rows: ExpertRows,
    gate_up_proj: Tensor,
    *,
    down_proj: Tensor,
    hidden: Tensor,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """`ExpertKernels.gradients` of the same."""
    assert rows.gathered is not None
    grad_x, *others = kernels.gradients(
        expand_rows(grad_y, rows.gathered),
        expand_rows(x, rows.gathered),
        rows._replace(gathered=None),
        gate_up_proj,
        down_proj=down_proj,
        hidden=hidden,
        needs=needs,
    )
    first, second, third = others
    return None if grad_x is None else sum_rows(grad_x, rows.gathered), first, second, third
