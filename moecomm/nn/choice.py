"""Which experts a token takes: top-k over all experts, or over the experts of its best groups."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["choose_experts", "limit_to_groups"]


def limit_to_groups(ranking: Tensor, *, num_groups: int, num_limited_groups: int, num_best: int) -> Tensor:
    """Rules out the experts of all but each token's best groups.

    Experts are split into `num_groups` contiguous groups of equal size. A group is worth the sum of its `num_best`
    highest values.

    Arguments:
        ranking: `[T, E]` floating.
        num_groups: number of groups, a divisor of E.
        num_limited_groups: groups that a token may choose from.
        num_best: values of a group that count.

    Returns:
        `[T, E]`, `ranking` with minus infinity at the experts that are ruled out.
    """
    num_tokens, num_experts = ranking.shape
    group_size = num_experts // num_groups
    grouped = ranking.view(num_tokens, num_groups, group_size)
    worth = grouped.topk(min(num_best, group_size), dim=2).values.sum(dim=2)
    best = worth.topk(num_limited_groups, dim=1, sorted=False).indices
    ruled_out = torch.ones_like(worth, dtype=torch.bool).scatter(1, best, False)
    return grouped.masked_fill(ruled_out.unsqueeze(2), -torch.inf).view(num_tokens, num_experts)


def choose_experts(ranking: Tensor, num_topk: int) -> Tensor:
    """`[T, K]` int64: the K experts of highest rank of each row of `ranking` `[T, E]`, best first. No gradient."""
    return ranking.topk(num_topk, dim=1).indices
