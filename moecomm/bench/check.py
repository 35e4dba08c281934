"""Counts wrong elements: the answers of a backend against what the workload says they must be."""

from __future__ import annotations

import torch
from torch import Tensor

from moecomm.bench.dispatchers import Arrived
from moecomm.bench.workload import Workload

__all__ = ["wrong_in_combine", "wrong_in_dispatch"]

# Rows are compared in pieces of about this many elements, so that a check needs little memory.
PIECE_ELEMENTS = 1 << 22

INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def wrong_in_dispatch(workload: Workload, arrived: Arrived) -> int:
    """Wrong elements in what a dispatch brought: rows and weights by their bits, and counts of rows per expert.

    A tensor of another shape or dtype than it must have counts as wrong in every element that it should have. Of slabs,
    the rows that their counts promise are compared.
    """
    hidden = workload.inputs.x.shape[1]
    num_rows = workload.payload.received
    counts, weights = workload.num_tokens_per_expert, workload.received_weights
    wrong = _differing(arrived.num_tokens_per_expert.to(counts.dtype), counts)
    # They are float32 numbers; some carry them as float64 beside float64 rows.
    x, brought = _rows(arrived.x, counts), arrived.topk_weights
    brought = weights.new_empty(0) if brought is None else _rows(brought.unsqueeze(-1), counts).squeeze(-1)
    wrong += _differing(brought.to(weights.dtype), weights)
    if x.shape != (num_rows, hidden) or x.dtype != workload.inputs.x.dtype:
        return wrong + num_rows * hidden
    step = max(1, PIECE_ELEMENTS // hidden)
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        wrong += _differing(x[first:last], workload.received_rows(first, last))
    return wrong


def wrong_in_combine(workload: Workload, combined: Tensor, *, scaled: bool, exact: bool, per_host: bool = False) -> int:
    """Wrong elements in what a combine gave back.

    Arguments:
        combined: `[T, H]`.
        scaled: whether the experts multiplied by `expert_scale`, or gave rows back as they came.
        exact: hold to the bit; otherwise allow what another order of float32 additions and a rounding to the next
            number of the dtype can change.
        per_host: whether the sum is made of sums per host.
    """
    x = workload.inputs.x
    num_tokens, hidden = x.shape
    if combined.shape != x.shape or combined.dtype != x.dtype:
        return x.numel()
    wrong = 0
    step = max(1, PIECE_ELEMENTS // hidden)
    for first in range(0, num_tokens, step):
        last = min(first + step, num_tokens)
        total, magnitude = workload.combined(first, last, scaled=scaled, per_host=per_host)
        part = combined[first:last]
        if exact:
            wrong += _differing(part, total.to(x.dtype))
            continue
        num_topk = workload.inputs.topk_idx.shape[1]
        allowed = torch.finfo(x.dtype).eps * total.abs()
        allowed += 2 * num_topk * torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps * magnitude
        # Written so that NaN counts as wrong.
        wrong += total.numel() - int(((part.to(total.dtype) - total).abs() <= allowed).sum())
    return wrong


def _rows(slabs: Tensor, counts: Tensor) -> Tensor:
    """`[E_local, capacity, W]` as the rows `[N, W]` that `counts` promise; `[N, W]` as it is."""
    if slabs.dim() != 3 or slabs.shape[0] != counts.shape[0]:
        return slabs
    return torch.cat([slab[:count] for slab, count in zip(slabs, counts.tolist(), strict=True)])


def _differing(found: Tensor, expected: Tensor) -> int:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return expected.numel()
    integers = INTEGER_OF_SIZE[expected.element_size()]
    return int((found.contiguous().view(integers) != expected.contiguous().view(integers)).sum())
