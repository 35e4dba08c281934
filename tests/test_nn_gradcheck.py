"""`torch.autograd.gradcheck` of router, dispatch, experts and combine as one function over all ranks.

Every rank checks the same function at the same time, from the inputs of all ranks to the outputs of all ranks, so that
all make the same calls. R ranks, T tokens over all ranks, H hidden, E experts, K top-k, I intermediate.
"""

import pytest
import torch

import moecomm
from moecomm.nn import GroupedExperts, TopKRouter, grouped_swiglu
from moecomm.testing import launch

HIDDEN, EXPERTS, TOPK, INTERMEDIATE = 4, 5, 3, 2


class Shared(torch.autograd.Function):
    """The same tensor on every rank; what the ranks' parts say about its gradient is added up."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        return sum(ctx.group.all_gather(grad.clone())), None


class Gathered(torch.autograd.Function):
    """Every rank's rows, on every rank."""

    @staticmethod
    def forward(ctx, rows, group):
        parts = group.all_gather(rows.detach().clone())
        begin = sum(part.shape[0] for part in parts[: group.rank])
        ctx.mine = slice(begin, begin + rows.shape[0])
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.mine].clone(), None


def random(*shape, seed):
    tensor = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (0.5 * tensor).requires_grad_()


def check_rank(group, num_tokens, form, alignment):
    ranks_tokens = slice(sum(num_tokens[: group.rank]), sum(num_tokens[: group.rank + 1]))
    inputs = (
        random(sum(num_tokens), HIDDEN, seed=1),
        random(EXPERTS, HIDDEN, seed=2),
        random(EXPERTS, 2 * INTERMEDIATE, HIDDEN, seed=3),
        random(EXPERTS, HIDDEN, INTERMEDIATE, seed=4),
    )
    router = TopKRouter(HIDDEN, EXPERTS, TOPK, score="sigmoid", dtype=torch.float64)
    masked = torch.zeros(sum(num_tokens), TOPK, dtype=torch.bool)
    masked[::2, 1] = True
    masked[-1] = True
    with moecomm.Communicator(group, num_experts=EXPERTS, hidden=HIDDEN, num_topk=TOPK) as communicator:
        local = list(communicator.local_experts)

        def model(*everything):
            x, gate, gate_up_proj, down_proj = (Shared.apply(tensor, group) for tensor in everything)
            rows = x[ranks_tokens]
            routing = torch.func.functional_call(router, {"weight": gate}, (rows,))
            routes = routing.topk_idx.clone()
            routes[1:2, 2] = routes[1:2, 0]
            routes[masked[ranks_tokens]] = -1
            weights = routing.topk_weights
            if form == "travelling":
                received = communicator.dispatch(rows, routes, weights, expert_alignment=alignment)
            else:
                received = communicator.dispatch(rows, routes, expert_alignment=alignment)
            y = grouped_swiglu(received.x, received.offsets, gate_up_proj[local], down_proj=down_proj[local])
            if form == "travelling":
                out = communicator.combine(y * received.topk_weights.unsqueeze(1), received.handle)
            else:
                out = communicator.combine(y, received.handle, weights)
            return Gathered.apply(out, group)

        return torch.autograd.gradcheck(model, inputs)


@pytest.mark.parametrize(("form", "alignment"), [("at home", 1), ("at home", 4), ("travelling", 1)])
@pytest.mark.parametrize("num_tokens", [[5], [5, 0], [2, 0, 3]])
def test_gradcheck_with_an_empty_rank_masked_routes_and_duplicates(num_tokens, form, alignment):
    assert all(launch(check_rank, len(num_tokens), num_tokens, form, alignment, timeout=120))


def ignored_rank(group):
    """Weights at -1 are NaN: neither they nor their gradients may reach anything."""
    routes = torch.tensor([[0, 4, 0], [-1, 2, 1], [-1, -1, -1]])
    x = random(3, HIDDEN, seed=group.rank)
    weights = random(3, TOPK, seed=9).detach()
    weights[routes < 0] = float("nan")
    weights.requires_grad_()
    with moecomm.Communicator(group, num_experts=EXPERTS, hidden=HIDDEN, num_topk=TOPK) as communicator:
        experts = GroupedExperts.for_communicator(communicator, INTERMEDIATE, std=0.3, dtype=torch.float64)
        received = communicator.dispatch(x, routes)
        out = communicator.combine(experts(received.x, received.offsets), received.handle, weights)
        out.sum().backward()
        assert (out[2] == 0).all()
        assert (weights.grad[routes < 0] == 0).all()
        assert all(torch.isfinite(tensor.grad).all() for tensor in (x, weights, *experts.parameters()))
    return True


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_weights_of_no_route_are_not_looked_at(ranks):
    assert all(launch(ignored_rank, ranks))
