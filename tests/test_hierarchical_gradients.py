"""Gradients over rails, and of sums per host: those of one host bit for bit, and those of finite differences."""

import pytest
import torch
from gradient_cases import HIDDEN, ROUTES, TOKENS, TOPK, communicator_of, mine, random, solo
from one_function import gathered, shared
from torch.utils.checkpoint import checkpoint

from moecomm import Topology
from moecomm.gradients import spread
from moecomm.testing import launch
from moecomm.testing.compare import assert_bitwise_equal

OPS = torch.ops.moecomm


def through(communicator, x, routes, weights, reduce, layout="expert_major"):
    received = communicator.dispatch(x, routes, weights, layout=layout)
    carried = received.topk_weights
    gate = carried[:, None] if carried.dim() == 1 else carried.sum(dim=1, keepdim=True)
    y = torch.sin(received.x) * (1.5 + gate)
    return communicator.combine(y, received.handle, weights if layout == "expert_major" else None, reduce=reduce)


def gradients(group, topology, reduce, layout, is_checkpointed, results):
    routes = ROUTES[mine(group)]
    x = random(sum(TOKENS[group.size]), HIDDEN, seed=1)[mine(group)].clone().requires_grad_()
    weights = random(sum(TOKENS[group.size]), TOPK, seed=2)[mine(group)].clone().requires_grad_()
    with communicator_of(group, topology=topology, algorithm="auto" if topology is None else "hierarchical") as comm:
        arguments = (comm, x, routes, weights, reduce, layout)
        out = checkpoint(through, *arguments, use_reentrant=False) if is_checkpointed else through(*arguments)
        (out * random(*out.shape, seed=3)).sum().backward()
    results[group.rank, topology, reduce, layout, is_checkpointed] = (x.grad, weights.grad)


@pytest.mark.parametrize("layout", ["expert_major", "flat"])
@pytest.mark.parametrize(
    ("num_ranks", "topology"), [(2, Topology.grid(1, 1)), (3, Topology.grid(2, 1))], ids=["1+1", "2+1"]
)
def test_the_same_gradients_as_on_one_host(num_ranks, topology, layout):
    results = {}
    for grid, reduce, again in ((None, "exact", False), (topology, "exact", False), (topology, "per_host", False)):
        launch(gradients, num_ranks, grid, reduce, layout, again, results, backend="threads")
    launch(gradients, num_ranks, topology, "per_host", layout, True, results, backend="threads")
    for (rank, *how), found in results.items():
        wanted = results[rank, None, "exact", layout, False]
        for got, want in zip(found, wanted, strict=True):
            assert_bitwise_equal(got, want, f"rank {rank}, {how}")


def finite_differences(group, topology):
    routes = ROUTES[mine(group)]
    inputs = (
        random(sum(TOKENS[group.size]), HIDDEN, seed=1).requires_grad_(),
        random(sum(TOKENS[group.size]), TOPK, seed=2).requires_grad_(),
    )
    with communicator_of(group, topology=topology, algorithm="hierarchical") as communicator:

        def whole(*everything):
            x, weights = (shared(tensor, group)[mine(group)] for tensor in everything)
            return gathered(through(communicator, x, routes, weights, "per_host"), group)

        return torch.autograd.gradcheck(whole, inputs, fast_mode=True)


def test_sums_per_host_against_finite_differences():
    assert launch(finite_differences, 3, Topology.grid(2, 1), backend="threads", timeout=60) == [True] * 3


@pytest.mark.parametrize("weighted", [False, True])
def test_the_operator_with_reduce_passes_opcheck(weighted):
    with solo() as communicator:
        received = communicator.dispatch(random(5, HIDDEN, seed=1), ROUTES)
        handle = received.handle
        y = received.x.detach().clone().requires_grad_()
        weights = random(5, TOPK, seed=2).requires_grad_() if weighted else None
        torch.library.opcheck(OPS.combine.default, (y, weights, None, *spread(handle)), {"reduce": "per_host"})


def compiled(group, topology):
    routes = ROUTES[mine(group)]
    x = random(sum(TOKENS[group.size]), HIDDEN, seed=1)[mine(group)].clone()
    weights = random(sum(TOKENS[group.size]), TOPK, seed=2)[mine(group)].clone()
    with communicator_of(group, topology=topology, algorithm="hierarchical") as comm:
        eager = through(comm, x, routes, weights, "per_host")
        function = torch.compile(through, backend="aot_eager", fullgraph=True)
        assert_bitwise_equal(function(comm, x, routes, weights, "per_host"), eager, "compiled")


def test_sums_per_host_are_compiled():
    launch(compiled, 2, Topology.grid(1, 1), backend="processes", timeout=60)
