"""What a dispatch gives, as rows of experts: checks of the three forms, and which rows are whose."""

from __future__ import annotations

import torch
from torch import Tensor

from moecomm.kernels.experts import ExpertRows
from moecomm.kernels.flat_rows import flat_rows

__all__ = ["rows_of"]

_INTEGERS = (torch.int32, torch.int64)
_WEIGHTS = (torch.float32, torch.float64)


def rows_of(
    x: Tensor,
    num_experts: int,
    *,
    offsets: Tensor | None,
    num_tokens_per_expert: Tensor | None,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
) -> ExpertRows:
    """Checks shapes and dtypes of one of the forms of `GroupedExperts.forward`, whose arguments these are.

    Raises:
        ValueError: none or several of `offsets`, `num_tokens_per_expert` and `topk_idx` are given, or shapes or dtypes
            do not fit; names the argument.
    """
    given = {"offsets": offsets, "num_tokens_per_expert": num_tokens_per_expert, "topk_idx": topk_idx}
    names = [name for name, tensor in given.items() if tensor is not None]
    if len(names) != 1:
        raise ValueError(f"exactly one of {', '.join(given)} must be given, got {' and '.join(names) or 'none'}")
    if topk_weights is not None and topk_idx is None:
        raise ValueError(f"topk_weights belong to topk_idx, got them with {names[0]}")
    if offsets is not None:
        _check_counts("offsets", offsets, num_experts)
        return ExpertRows(x.shape[0], offsets)
    if num_tokens_per_expert is not None:
        _check_counts("num_tokens_per_expert", num_tokens_per_expert, num_experts)
        return ExpertRows(
            x.shape[0] * x.shape[1], None, num_tokens_per_expert=num_tokens_per_expert, capacity=x.shape[1]
        )
    assert topk_idx is not None
    if topk_idx.dim() != 2 or topk_idx.shape[0] != x.shape[0] or topk_idx.dtype not in _INTEGERS:
        raise ValueError(f"topk_idx must be int32 or int64 [{x.shape[0]}, K], got {_form(topk_idx)}")
    if topk_weights is not None and (topk_weights.shape != topk_idx.shape or topk_weights.dtype not in _WEIGHTS):
        raise ValueError(f"topk_weights must be float32 or float64 {list(topk_idx.shape)}, got {_form(topk_weights)}")
    return flat_rows(topk_idx, num_experts, topk_weights)


def _check_counts(name: str, counts: Tensor, num_experts: int) -> None:
    if counts.shape != (num_experts,) or counts.dtype not in _INTEGERS:
        raise ValueError(f"{name} must be int32 or int64 [{num_experts}], got {_form(counts)}")


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
