"""Dispatch, combine and experts between them against finite differences, over all ranks and again for the gradients."""

import pytest
import torch
from gradient_cases import HIDDEN, ROUTES, TOKENS, TOPK, communicator_of, mine, random
from one_function import gathered, shared

from moecomm.testing import launch


def with_nan(weights, routes):
    """What stands where there is no route must not matter."""
    return torch.where(routes < 0, float("nan"), weights)


def pieces(communicator, routes, options):
    """Ways through dispatch, experts and combine: `(x, weights, scale)` to `[T, H]`, by name."""

    def expert(x, scale):
        return torch.sin(x) * (scale + x)

    def at_home(x, weights, scale):
        received = communicator.dispatch(x, routes, **options)
        return communicator.combine(expert(received.x, scale), received.handle, with_nan(weights, routes))

    def travelling(x, weights, scale):
        received = communicator.dispatch(x, routes, with_nan(weights, routes), **options)
        carried = received.topk_weights
        gate = carried if carried.dim() == 1 else carried.sum(dim=1)
        return communicator.combine(expert(received.x, scale) * gate[:, None], received.handle)

    def cached(x, weights, scale):
        handle = communicator.dispatch(x.detach() * 7, routes, **options).handle
        received = communicator.dispatch(x * scale, None, with_nan(weights, routes), handle=handle)
        gate = received.topk_weights.reshape(received.x.shape[0], -1).sum(dim=1, keepdim=True)
        return communicator.combine(expert(received.x, scale) * gate, handle)

    def twice(x, weights, scale):
        # The rows feed two experts, the handle serves two combines and another dispatch, all in one graph.
        first = communicator.dispatch(x, routes, with_nan(weights, routes), **options)
        again = communicator.dispatch(x * x, handle=first.handle)
        gate = first.topk_weights.reshape(first.x.shape[0], -1).sum(dim=1, keepdim=True)
        one = communicator.combine(expert(first.x, scale) + again.x, first.handle)
        return one + communicator.combine(first.x * again.x * gate, first.handle)

    def asynchronous(x, weights, scale):
        received = communicator.dispatch_async(x, routes, **options).wait()
        first = communicator.combine_async(expert(received.x, scale), received.handle, with_nan(weights, routes))
        second = communicator.combine_async(received.x, received.handle)
        return second.wait() + first.wait()

    return {way.__name__: way for way in (at_home, travelling, cached, twice, asynchronous)}


def check_rank(group, check, way, options):
    inputs = (
        random(sum(TOKENS[group.size]), HIDDEN, seed=1).requires_grad_(),
        random(sum(TOKENS[group.size]), TOPK, seed=2).requires_grad_(),
        random(1, seed=3).requires_grad_(),
    )
    routes = ROUTES[mine(group)]
    with communicator_of(group) as communicator:
        through = pieces(communicator, routes, options)[way]

        def whole(*everything):
            x, weights, scale = (shared(tensor, group) for tensor in everything)
            return gathered(through(x[mine(group)], weights[mine(group)], scale), group)

        if check == "first":
            return torch.autograd.gradcheck(whole, inputs)
        return torch.autograd.gradgradcheck(whole, inputs, fast_mode=True)


WAYS = [
    ("at_home", {}),
    ("at_home", {"expert_alignment": 4}),
    ("at_home", {"mode": "low_latency", "layout": "expert_major"}),
    ("travelling", {}),
    ("travelling", {"expert_alignment": 2}),
    ("travelling", {"layout": "flat"}),
    ("cached", {"expert_alignment": 3}),
    ("cached", {"layout": "flat"}),
    ("twice", {}),
    ("asynchronous", {}),
]


@pytest.mark.parametrize(("way", "options"), WAYS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradcheck(ranks, way, options):
    assert all(launch(check_rank, ranks, "first", way, options, timeout=120))


@pytest.mark.parametrize(
    ("way", "options"), [("at_home", {}), ("travelling", {"layout": "flat"}), ("twice", {})], ids=str
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_can_be_differentiated_again(ranks, way, options):
    assert all(launch(check_rank, ranks, "second", way, options, timeout=120))
