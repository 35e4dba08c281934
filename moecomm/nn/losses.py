"""The two auxiliary losses of a router, and the scale they are given.

T tokens of this rank that are not padding; T_all the same over every rank; R ranks; E experts.

Scale. Both losses are means over tokens. What a rank returns is

    (sum over its own T tokens) * R / T_all

so that the *mean over ranks* of what the ranks return is the loss of the whole batch, however the batch is spread over
them: equally, unequally, or with ranks that hold nothing. A mean over ranks is what data parallelism makes of the
gradients of a router's weight. Without a group, R = 1 and T_all = T.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["load_balance_loss", "router_z_loss"]


def load_balance_loss(probabilities: Tensor, num_tokens_per_expert: Tensor, *, token_scale: Tensor) -> Tensor:
    """E * sum over experts of f_e * P_e: 1 for a perfect balance, up to E / K when K experts take everything.

    f_e is the share of all routes that went to expert e (a constant: counts have no gradient) and P_e the mean
    probability that tokens gave it. This is the loss of the Switch Transformer (Fedus et al. 2021, equations 4 to 6),
    with f_e over all K routes of a token as in DeepSeek-V3 (2024, equations 17 to 20). Over a group, f_e counts the
    routes of every rank: the product of two local means would depend on how the batch is split.

    Arguments:
        probabilities: `[T, E]` fp32, rows that sum to 1, or rows of zeros (padding).
        num_tokens_per_expert: `[E]` integer, routes per expert over every rank.
        token_scale: scalar, R / T_all, or 0 when there are no tokens at all.

    Returns:
        Scalar of the dtype of `probabilities`, differentiable in it.
    """
    num_experts = probabilities.shape[1]
    counts = num_tokens_per_expert.to(probabilities.dtype)
    shares = counts / counts.sum().clamp(min=1)
    return num_experts * token_scale * torch.dot(shares, probabilities.sum(dim=0))


def router_z_loss(logits: Tensor, is_counted: Tensor | None, *, token_scale: Tensor) -> Tensor:
    """Mean over tokens of logsumexp(logits) ** 2, which keeps logits small (ST-MoE, Zoph et al. 2022, equation 5).

    Arguments:
        logits: `[T, E]` fp32.
        is_counted: `[T]` bool, False = padding; None = every token counts.
        token_scale: scalar, R / T_all, or 0 when there are no tokens at all.

    Returns:
        Scalar of the dtype of `logits`, differentiable in it.
    """
    squares = torch.logsumexp(logits, dim=1).square()
    if is_counted is not None:
        squares = torch.where(is_counted, squares, 0)
    return token_scale * squares.sum()
