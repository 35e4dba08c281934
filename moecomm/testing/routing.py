"""Routing generators: which experts the tokens of one rank choose.

All take (num_tokens, num_experts, num_topk, *, seed) and return topk_idx `[num_tokens, num_topk]` int64, -1 = no
expert. A token's experts are distinct unless said otherwise; where a token has more choices than there are experts to
choose from, the rest are -1. The same arguments give the same routing; ranks pass different seeds.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = [
    "all_to_one_rank",
    "hot_expert",
    "limited_to_groups",
    "masked",
    "no_routes",
    "uniform",
    "with_duplicates",
    "zipf",
]

_SAMPLE_TOKENS = 2048  # on which the exponent of `zipf` is found


def uniform(num_tokens: int, num_experts: int, num_topk: int, *, seed: int = 0) -> Tensor:
    """Every expert equally likely."""
    return _choose(torch.zeros(num_experts, dtype=torch.float64), num_tokens, num_topk, _generator(seed))


def zipf(num_tokens: int, num_experts: int, num_topk: int, *, seed: int = 0, max_over_mean: float = 1.5) -> Tensor:
    """Popularity falls as rank ** -s; s is such that the most popular expert has `max_over_mean` times the mean load.

    Which expert is popular depends on `num_experts` only, so ranks with different seeds agree on it.

    Raises:
        ValueError: `max_over_mean` is below 1 or above num_experts / num_topk, where every token has chosen the expert.
    """
    limit = max(1.0, num_experts / num_topk)
    if not 1.0 <= max_over_mean <= limit:
        raise ValueError(
            f"max_over_mean must be in [1, {limit:g}] for top-{num_topk} of {num_experts} experts, "
            f"got {max_over_mean:g}"
        )
    exponent = _zipf_exponent(num_experts, num_topk, max_over_mean)
    expert_at = torch.randperm(num_experts, generator=_generator(num_experts))
    chosen = _choose(-exponent * _log_places(num_experts), num_tokens, num_topk, _generator(seed))
    return torch.where(chosen >= 0, expert_at[chosen.clamp_min(0)], -1)


def hot_expert(num_tokens: int, num_experts: int, num_topk: int, *, seed: int = 0, expert: int = 0) -> Tensor:
    """Every token chooses `expert`, at a random place among its choices; the other choices are uniform."""
    if not 0 <= expert < num_experts:
        raise ValueError(f"expert must be in [0, {num_experts}), got {expert}")
    generator = _generator(seed)
    # A place in front that nobody else can take, then a shuffle of the columns of each token.
    logits = torch.zeros(num_experts, dtype=torch.float64)
    logits[expert] = 1e9
    chosen = _choose(logits, num_tokens, num_topk, generator)
    order = torch.rand(num_tokens, num_topk, generator=generator).argsort(dim=1)
    return chosen.gather(1, order)


def masked(num_tokens: int, num_experts: int, num_topk: int, *, seed: int = 0, fraction: float = 0.3) -> Tensor:
    """Uniform, but each route is -1 with probability `fraction`."""
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction must be in [0, 1], got {fraction}")
    generator = _generator(seed)
    chosen = _choose(torch.zeros(num_experts, dtype=torch.float64), num_tokens, num_topk, generator)
    return chosen.masked_fill(torch.rand(num_tokens, num_topk, generator=generator) < fraction, -1)


def limited_to_groups(
    num_tokens: int, num_experts: int, num_topk: int, *, seed: int = 0, group_of_expert: Tensor, num_limited_groups: int
) -> Tensor:
    """Every token chooses from the experts of so many groups only, as with a group-limited router; groups and experts
    are equally likely.

    Arguments:
        group_of_expert: `[num_experts]` int64, groups numbered from 0.
        num_limited_groups: groups a token may choose from.

    Raises:
        ValueError: there are fewer groups, or `group_of_expert` has another shape.
    """
    if group_of_expert.shape != (num_experts,):
        raise ValueError(f"group_of_expert must be [{num_experts}], got {list(group_of_expert.shape)}")
    num_groups = int(group_of_expert.max()) + 1
    if not 1 <= num_limited_groups <= num_groups:
        raise ValueError(f"num_limited_groups must be from 1 to the {num_groups} groups, got {num_limited_groups}")
    groups = uniform(num_tokens, num_groups, num_limited_groups, seed=seed)
    is_allowed = torch.zeros(num_tokens, num_groups, dtype=torch.bool).scatter_(1, groups, True)
    scores = torch.rand(num_tokens, num_experts, generator=_generator(seed + 1), dtype=torch.float64)
    scores = scores.masked_fill(~is_allowed[:, group_of_expert], -1.0)
    best = scores.topk(min(num_topk, num_experts), dim=1)
    chosen = torch.full((num_tokens, num_topk), -1, dtype=torch.int64)
    chosen[:, : best.indices.shape[1]] = best.indices.masked_fill(best.values < 0, -1)
    return chosen


def all_to_one_rank(
    num_tokens: int, num_experts: int, num_topk: int, *, seed: int = 0, num_ranks: int, rank: int = 0
) -> Tensor:
    """Every token chooses experts of `rank` only, in the default placement (contiguous blocks)."""
    each, more = divmod(num_experts, num_ranks)
    first, count = rank * each + min(rank, more), each + (rank < more)
    if not 0 <= rank < num_ranks or not count:
        raise ValueError(f"rank {rank} of {num_ranks} hosts none of the {num_experts} experts")
    chosen = uniform(num_tokens, count, num_topk, seed=seed)
    return torch.where(chosen >= 0, chosen + first, -1)


def no_routes(num_tokens: int, num_experts: int, num_topk: int, *, seed: int = 0) -> Tensor:
    """No token chooses any expert."""
    del num_experts, seed
    return torch.full((num_tokens, num_topk), -1, dtype=torch.int64)


def with_duplicates(num_tokens: int, num_experts: int, num_topk: int, *, seed: int = 0) -> Tensor:
    """Every choice uniform by itself, so that a token may choose the same expert more than once."""
    return torch.randint(num_experts, (num_tokens, num_topk), generator=_generator(seed))


@functools.cache
def _zipf_exponent(num_experts: int, num_topk: int, max_over_mean: float) -> float:
    """Found by bisection on a sample of tokens that is always the same."""
    places = _log_places(num_experts)
    mean = _SAMPLE_TOKENS * min(num_topk, num_experts) / num_experts
    low, high = 0.0, 64.0
    for _ in range(24):
        middle = (low + high) / 2
        sample = _choose(-middle * places, _SAMPLE_TOKENS, num_topk, _generator(0))
        load = int((sample == 0).sum()) / mean
        low, high = (middle, high) if load < max_over_mean else (low, middle)
    return high


def _log_places(num_experts: int) -> Tensor:
    return torch.log(torch.arange(1, num_experts + 1, dtype=torch.float64))


def _choose(logits: Tensor, num_tokens: int, num_topk: int, generator: torch.Generator) -> Tensor:
    """Draws without replacement, by the Gumbel trick: the largest of logit + noise, in that order."""
    num_experts = logits.shape[0]
    noise = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float64).clamp_min(1e-300)
    count = min(num_topk, num_experts)
    chosen = torch.full((num_tokens, num_topk), -1, dtype=torch.int64)
    chosen[:, :count] = (logits - torch.log(-torch.log(noise))).topk(count, dim=1).indices
    return chosen


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
