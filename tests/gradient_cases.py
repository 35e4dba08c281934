"""What the tests of gradients share: sizes, routes, random tensors, communicators."""

from datetime import timedelta

import torch

import moecomm

HIDDEN, EXPERTS, TOPK = 3, 5, 3
# Tokens by rank, and the routes of all of them: -1 at both ends and all over, the same expert twice and thrice.
TOKENS = {1: [5], 2: [5, 0], 3: [2, 0, 3]}
ROUTES = torch.tensor([[0, 4, 0], [-1, 2, 1], [-1, -1, -1], [3, 3, 3], [4, 1, -1]])


def generator(seed):
    return torch.Generator().manual_seed(seed)


def random(*shape, seed, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64, generator=generator(seed)).to(dtype)


def communicator_of(group, **options):
    sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "num_topk": TOPK, "max_tokens_per_rank": 5, **options}
    return moecomm.Communicator(group, timeout=timedelta(seconds=20), **sizes)


def mine(group):
    """Which of all tokens are this rank's."""
    tokens = TOKENS[group.size]
    return slice(sum(tokens[: group.rank]), sum(tokens[: group.rank + 1]))


def solo(**options):
    """A communicator of one rank."""
    return communicator_of(moecomm.SoloGroup(), **options)
