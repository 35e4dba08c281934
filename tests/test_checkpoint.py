"""Activation checkpointing: the same gradients, no needless exchange, an error where a recompute routes otherwise."""

import functools

import pytest
import torch
from gradient_cases import HIDDEN, ROUTES, TOPK, communicator_of, mine, random
from tiny_rings import tiny_rings
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import moecomm
from moecomm import Topology
from moecomm.testing import launch

OPS = torch.ops.moecomm
KEPT = [OPS.dispatch.default, OPS.dispatch_cached.default, OPS.combine.default]


def keep(operators):
    """What the user of selective checkpointing writes."""
    return functools.partial(create_selective_checkpoint_contexts, operators)


# -- the checkpointed part -------------------------------------------------------------------------------------------


def at_home(communicator, x, routes, weights, scale):
    received = communicator.dispatch(x * scale, routes)
    return communicator.combine(torch.tanh(received.x * scale), received.handle, weights)


def travelling(communicator, x, routes, weights, scale):
    received = communicator.dispatch(x, routes, weights * scale, expert_alignment=2)
    y = torch.tanh(received.x * scale) * received.topk_weights[:, None]
    return torch.sigmoid(communicator.combine(y, received.handle))


def flat_and_cached(communicator, x, routes, weights, scale):
    received = communicator.dispatch(x, routes, weights, layout="flat")
    again = communicator.dispatch(x * scale, handle=received.handle)
    gate = received.topk_weights.sum(dim=1, keepdim=True)
    return communicator.combine(torch.tanh(received.x * again.x) * gate, received.handle)


def asynchronous(communicator, x, routes, weights, scale):
    received = communicator.dispatch_async(x, routes).wait()
    work = communicator.combine_async(torch.tanh(received.x * scale), received.handle, weights)
    shared = torch.tanh(x * scale)
    return shared + work.wait()


def low_latency(communicator, x, routes, weights, scale):
    received = communicator.dispatch(x, routes, weights, mode="low_latency")
    y = torch.tanh(received.x * scale) * received.topk_weights[:, :, None]
    return communicator.combine(y, received.handle)


WAYS = [at_home, travelling, flat_and_cached, asynchronous, low_latency]


def inputs_of(group):
    routes = ROUTES[mine(group)]
    tensors = (
        random(routes.shape[0], HIDDEN, seed=group.rank),
        routes,
        random(*routes.shape, seed=10 + group.rank),
        random(1, seed=20),
    )
    return [tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in tensors]


def gradients_of(inputs):
    found = [tensor.grad for tensor in inputs if tensor.requires_grad]
    for tensor in inputs:
        tensor.grad = None
    return found


def calls(communicator):
    """Exchanges of counts, and all calls, so far."""
    return communicator.stats["announcements"], communicator.stats["calls"]


def compared_rank(group, way, options, wrap=None):
    """Whether all gradients are the same; exchanges of counts, and calls, in the forward and in the backward."""
    inputs = inputs_of(group)
    with communicator_of(group) as communicator:
        plain = way(communicator, *inputs)
        before = calls(communicator)
        plain.square().sum().backward()
        backward = calls(communicator)[1] - before[1]
        expected = gradients_of(inputs)
        before = calls(communicator)
        function = way if wrap is None else torch.compile(way, fullgraph=True, backend=wrap)
        out = checkpoint(function, communicator, *inputs, **options)
        middle = calls(communicator)
        out.square().sum().backward()
        after = calls(communicator)
        got = gradients_of(inputs)
        assert torch.equal(out, plain)
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
        # Of the calls in the checkpointed backward, those that are not the plain backward's.
        return (middle[0] - before[0], after[0] - middle[0]), (middle[1] - before[1], after[1] - middle[1] - backward)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_same_gradients(ranks, way, use_reentrant):
    counted = 0 if way is low_latency else 1
    for announcements, (in_forward, in_recompute) in launch(
        compared_rank, ranks, way, {"use_reentrant": use_reentrant}
    ):
        assert announcements == (counted, counted)
        assert in_recompute == in_forward


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_selective_checkpointing_exchanges_nothing_again(ranks, way):
    options = {"use_reentrant": False, "context_fn": keep(KEPT)}
    counted = 0 if way is low_latency else 1
    for announcements, (_, in_recompute) in launch(compared_rank, ranks, way, options):
        assert announcements == (counted, 0)
        assert in_recompute == 0


def dispatch_only(context, operator, *arguments, **options):
    saved = operator is OPS.dispatch.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("kept", [[OPS.dispatch.default], dispatch_only])
def test_keeping_the_dispatch_is_enough_to_exchange_no_counts_again(kept):
    for announcements, (_, in_recompute) in launch(
        compared_rank, 2, at_home, {"use_reentrant": False, "context_fn": keep(kept)}
    ):
        assert announcements == (1, 0)
        assert in_recompute == 1


@pytest.mark.parametrize("way", [at_home, travelling])
def test_a_compiled_function_in_a_checkpoint(way):
    ((announcements, _),) = launch(compared_rank, 1, way, {"use_reentrant": False}, "aot_eager")
    assert announcements == (1, 1)


def nested_rank(group, inner, outer):
    inputs = inputs_of(group)
    with communicator_of(group) as communicator:

        def layer(x, routes, weights, scale):
            return x + checkpoint(at_home, communicator, x, routes, weights, scale, **inner)

        def two(x, *rest):
            return layer(layer(x, *rest), *rest)

        results = []
        for run in (functools.partial(two, *inputs), functools.partial(checkpoint, two, *inputs, **outer)):
            run().square().sum().backward()
            results.append(gradients_of(inputs))
    return [torch.equal(one, other) for one, other in zip(*results, strict=True)]


def test_a_checkpoint_in_a_checkpoint():
    assert all(all(same) for same in launch(nested_rank, 2, {"use_reentrant": False}, {"use_reentrant": False}))


def compiled_with_checkpoint_rank(group, options):
    inputs = inputs_of(group)
    with communicator_of(group) as communicator:

        def layer(*arguments):
            return torch.sin(checkpoint(at_home, communicator, *arguments, **options)).square().sum()

        layer(*inputs).backward()
        expected = gradients_of(inputs)
        before = calls(communicator)
        torch.compile(layer, fullgraph=True, backend="aot_eager")(*inputs).backward()
        got = gradients_of(inputs)
        return calls(communicator)[0] - before[0], [torch.equal(a, b) for a, b in zip(got, expected, strict=True)]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kept", [[], KEPT])
def test_a_checkpoint_in_a_compiled_function(kept):
    options = {"use_reentrant": False, **({"context_fn": keep(kept)} if kept else {})}
    ((announcements, same),) = launch(compiled_with_checkpoint_rank, 1, options)
    assert announcements == (1 if kept else 2)
    assert all(same)


def hooked_rank(group, pack):
    inputs = inputs_of(group)
    with communicator_of(group) as communicator:
        at_home(communicator, *inputs).square().sum().backward()
        expected = gradients_of(inputs)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
            out = at_home(communicator, *inputs)
        out.square().sum().backward()
        return [torch.equal(one, other) for one, other in zip(gradients_of(inputs), expected, strict=True)]


@pytest.mark.parametrize("pack", [torch.clone, functools.partial(torch.clone)], ids=["function", "no function"])
def test_hooks_on_saved_tensors(pack):
    """As offloading uses them. What comes back is another tensor with the same stamp."""
    assert all(all(same) for same in launch(hooked_rank, 2, pack))


# -- a recompute that routes otherwise -------------------------------------------------------------------------------

FIRST = torch.tensor([[0, 1, 2], [3, 4, 0], [4, -1, 1], [2, 2, 3]])


def changed(kind):
    routes = FIRST.clone()
    if kind == "two tokens swapped":  # all counts agree
        routes[0], routes[1] = FIRST[1], FIRST[0]
    elif kind == "another expert":  # counts of experts and ranks change
        routes[0, 0] = 4
    elif kind == "one route less":
        routes[3, 2] = -1
    return routes


def changing_rank(group, kind, culprit, way, wrap, is_known, topology=None):
    """What this rank sees, and whether the step after that is right."""
    x, weights, scale = random(4, HIDDEN, seed=1), random(4, TOPK, seed=2), random(1, seed=3)
    inputs = [tensor.requires_grad_() for tensor in (x, weights, scale)]
    second = changed(kind)
    seen, routes = [], iter([])

    def part(x, weights, scale):
        return way(communicator, x, next(routes), weights, scale)

    def step(*chosen):
        nonlocal routes
        routes = iter(chosen)
        gradients_of(inputs)
        out = checkpoint(compiled, x, weights, scale, use_reentrant=False)
        out.square().sum().backward()
        return gradients_of(inputs)

    options = {} if topology is None else {"topology": topology, "algorithm": "hierarchical"}
    with communicator_of(group, **options) as communicator:
        compiled = part
        if wrap is not None:
            inner = torch.compile(way, fullgraph=True, backend=wrap)

            def compiled(x, weights, scale):
                return inner(communicator, x, next(routes), weights, scale)

        expected = step(FIRST, FIRST)
        if is_known:  # the other routing occurs, too, so that it is not new when it comes in a recompute
            step(second, second)
        try:
            step(FIRST, second if group.rank == culprit else FIRST)
        except (moecomm.MoecommError, CheckpointError) as error:
            seen = [type(error), str(error)]
        return *seen, [torch.equal(one, other) for one, other in zip(step(FIRST, FIRST), expected, strict=True)]


KINDS = ["two tokens swapped", "another expert", "one route less"]


def check_changed(ranks, culprit, outcome):
    for rank, (kind, text, same) in enumerate(outcome):
        assert kind is (moecomm.RoutingChanged if rank == culprit else moecomm.PeerFailed), (rank, text)
        assert "topk_idx differs" in text
        assert all(same), "the step after the failure"


@pytest.mark.parametrize("way", [at_home, travelling, asynchronous, low_latency])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "culprit"), [(1, 0), (2, 0), (2, 1), (3, 2)])
def test_a_recompute_that_routes_otherwise_fails_on_all_ranks(ranks, culprit, kind, way):
    check_changed(ranks, culprit, launch(changing_rank, ranks, kind, culprit, way, None, False))


@pytest.mark.parametrize("way", [at_home, travelling, asynchronous])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("culprit", [0, 3])
def test_a_recompute_that_routes_otherwise_fails_between_domains(culprit, kind, way):
    """The others have rows under way to their rails, in rings that hold no more of them."""
    with tiny_rings(most_rows=1):
        outcome = launch(
            *(changing_rank, 4, kind, culprit, way, None, False, Topology.grid(2, 2)), backend="threads", timeout=60
        )
    check_changed(4, culprit, outcome)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_recompute_that_routes_otherwise_fails(kind):
    check_changed(1, 0, launch(changing_rank, 1, kind, 0, at_home, "aot_eager", False))


@pytest.mark.parametrize("way", [at_home, travelling])
@pytest.mark.parametrize(("ranks", "culprit"), [(1, 0), (2, 1), (3, 0)])
def test_a_routing_of_another_step_does_not_pass_either(ranks, culprit, way):
    check_changed(ranks, culprit, launch(changing_rank, ranks, KINDS[0], culprit, way, None, True))


@pytest.mark.parametrize(("ranks", "culprit"), [(2, 1), (3, 2)])
def test_a_routing_of_another_step_with_other_counts(ranks, culprit):
    # Torch itself finds that shapes differ, on the ranks where they do; nobody waits, and the next step is right.
    for kind, text, same in launch(changing_rank, ranks, KINDS[1], culprit, at_home, None, True):
        assert kind in (CheckpointError, moecomm.RoutingChanged, moecomm.PeerFailed), text
        assert all(same)


def reentrant_rank(group):
    x, weights, scale = random(4, HIDDEN, seed=1), random(4, TOPK, seed=2), random(1, seed=3)
    inputs = [tensor.requires_grad_() for tensor in (x, weights, scale)]
    with communicator_of(group) as communicator:
        routes = iter([FIRST, changed(KINDS[0])])

        def part(x, weights, scale):
            return at_home(communicator, x, next(routes), weights, scale)

        checkpoint(part, x, weights, scale, use_reentrant=True).sum().backward()
        got = gradients_of(inputs)
        at_home(communicator, x, changed(KINDS[0]), weights, scale).sum().backward()
        return [torch.equal(one, other) for one, other in zip(got, gradients_of(inputs), strict=True)]


def test_reentrant_checkpointing_hides_a_change_of_routing():
    """It runs the part twice, as two forwards of their own, so nothing tells them apart: use_reentrant=False does."""
    assert launch(reentrant_rank, 2) == [[True] * 3] * 2
