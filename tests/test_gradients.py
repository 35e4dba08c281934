"""Gradients of dispatch and combine: exchanges bit by bit, who takes part, what may change, which dtypes.

Against finite differences: test_gradcheck.py.
"""

import hashlib

import pytest
import torch
from gradient_cases import EXPERTS, HIDDEN, ROUTES, TOPK, communicator_of, generator, mine, random, solo

import moecomm
from moecomm.gradients import spread
from moecomm.kernels import kernels_for
from moecomm.kernels.base import weights_dtype
from moecomm.testing import launch, reference_combine, reference_dispatch

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


# -- the adjoints are exchanges, bit by bit --------------------------------------------------------------------------


def adjoint_rank(group, dtype, layout, alignment):
    routes = [ROUTES.roll(rank, 0)[: 5 - 2 * rank] for rank in range(group.size)]
    inputs = [random(idx.shape[0], 70, seed=rank, dtype=dtype) for rank, idx in enumerate(routes)]
    weights = [random(*idx.shape, seed=10 + rank, dtype=weights_dtype(dtype)) for rank, idx in enumerate(routes)]
    form = {"layout": layout, "expert_alignment": alignment}
    arrived = [
        reference_dispatch(inputs, routes, weights, num_experts=EXPERTS, rank=rank, **form)
        for rank in range(group.size)
    ]
    rank, own = group.rank, weights[group.rank].clone()
    own[routes[rank] < 0] = float("nan")
    own.requires_grad_()
    x = inputs[rank].clone().requires_grad_()
    with communicator_of(group, hidden=70) as communicator:
        # Of dispatch: the gradients of rows are summed home, those of weights come home one by one.
        received = communicator.dispatch(x, routes[rank], own, **form)
        grads = [random(*one.x.shape, seed=20 + r, dtype=dtype) for r, one in enumerate(arrived)]
        grad_weights = random(*received.topk_weights.shape, seed=30, dtype=weights_dtype(dtype))
        torch.autograd.backward((received.x, received.topk_weights), (grads[rank], grad_weights))
        home = reference_combine(grads, routes, num_experts=EXPERTS, rank=rank, **form)
        assert torch.equal(x.grad, home)
        assert (own.grad[routes[rank] < 0] == 0).all()
        if group.size == 1 and layout == "expert_major":
            token, choice = arrived[0].sources[:, 1:].unbind(1)
            real = token >= 0
            assert torch.equal(own.grad[token[real], choice[real]], grad_weights[real])

        # Of combine: the gradients are dispatched, without padding and weights of their own.
        y = random(*arrived[rank].x.shape, seed=40 + rank, dtype=dtype).requires_grad_()
        gradients = [random(*one.shape, seed=50 + r, dtype=dtype) for r, one in enumerate(inputs)]
        communicator.combine(y, received.handle).backward(gradients[rank])
        sent = reference_dispatch(gradients, routes, weights, num_experts=EXPERTS, rank=rank, **form)
        assert torch.equal(y.grad, sent.x)
        if layout == "flat":
            return

        # Of a weighted combine: scaled where the experts are, and the products of rows and gradients come home.
        y.grad = own.grad = None
        communicator.combine(y, received.handle, own).backward(gradients[rank])
        scaled, products = kernels_for("reference").scale_dot(sent.x, y.detach(), sent.topk_weights)
        assert torch.equal(y.grad, scaled)
        everyone = group.all_gather((arrived[rank].sources, products))
        expected = torch.zeros_like(own)
        for sources, values in everyone:
            here = sources[:, 0] == rank
            expected[sources[here, 1], sources[here, 2]] = values[here]
        assert torch.equal(own.grad, expected)


@pytest.mark.parametrize(("layout", "alignment"), [("expert_major", 1), ("expert_major", 4), ("flat", 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_adjoints_are_exchanges_of_gradients(ranks, dtype, layout, alignment):
    launch(adjoint_rank, ranks, dtype, layout, alignment)


def digest_rank(group, transport, dtype):
    """Fingerprints of this rank's gradients, token by token."""
    tokens, hidden = 24, 40
    share = slice(tokens * group.rank // group.size, tokens * (group.rank + 1) // group.size)
    routes = torch.randint(-1, EXPERTS, (tokens, TOPK), generator=generator(1))[share]
    x = random(tokens, hidden, seed=2, dtype=dtype)[share].clone().requires_grad_()
    weights = random(tokens, TOPK, seed=3, dtype=torch.float32)[share].clone().requires_grad_()
    grad = random(tokens, hidden, seed=4, dtype=dtype)[share]
    with communicator_of(group, hidden=hidden, transport=transport) as communicator:
        received = communicator.dispatch(x, routes, weights)
        y = torch.tanh(received.x) * received.topk_weights[:, None].to(dtype)
        communicator.combine(y, received.handle, weights).backward(grad)
    rows = torch.cat([x.grad.double(), weights.grad.double()], dim=1)
    return [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_the_same_bits_over_every_transport_and_number_of_ranks(dtype):
    worlds = [("threads", "local", ranks) for ranks in (1, 2, 3, 4)]
    worlds += [("processes", "shm", 2), ("processes", "collective", 2), ("processes", "shm", 4)]
    digests = {
        world: sum(launch(digest_rank, world[2], world[1], dtype, backend=world[0], timeout=60), []) for world in worlds
    }
    for world, found in digests.items():
        assert found == digests["threads", "local", 1], world


# -- who takes part, and how often -----------------------------------------------------------------------------------


def count_rank(group):
    routes = ROUTES[mine(group)]
    x = random(*routes.shape[:1], HIDDEN, seed=group.rank).requires_grad_()
    weights = torch.rand(routes.shape).requires_grad_()
    with communicator_of(group) as communicator:
        received = communicator.dispatch(x, routes, weights)
        out = communicator.combine(received.x * received.topk_weights[:, None], received.handle, weights)
        forward = communicator.stats["announcements"]
        out.sum().backward()
        return forward, communicator.stats["announcements"]


def test_a_backward_exchanges_no_counts():
    assert launch(count_rank, 2) == [(1, 1), (1, 1)]


def some_grad_rank(group, wants, form):
    """Some ranks' rows (or weights) need no gradient; the others' must come out right, and all must stay in step."""
    results = []
    for everybody in (True, False):
        routes = ROUTES.roll(group.rank, 0)
        x = random(5, HIDDEN, seed=group.rank)
        weights = random(5, TOPK, seed=9 + group.rank)
        if everybody or wants[group.rank]:
            (x if form == "rows" else weights).requires_grad_()
        with communicator_of(group) as communicator:
            travel = weights if form == "travelling weights" else None
            received = communicator.dispatch(x, routes, travel)
            y = received.x if travel is None else received.x * received.topk_weights[:, None]
            out = communicator.combine(y, received.handle, weights if form == "weights at home" else None)
            assert out.requires_grad, "who has no part in the graph cannot take part in the backward"
            out.square().sum().backward()
            assert communicator.combine(communicator.dispatch(x.detach(), routes).x, received.handle).shape == x.shape
        grad = (x if form == "rows" else weights).grad
        assert (grad is not None) == (everybody or wants[group.rank])
        results.append(grad)
    return results


@pytest.mark.parametrize("form", ["rows", "travelling weights", "weights at home"])
@pytest.mark.parametrize("wants", [[True, False], [False, True, False]])
@pytest.mark.parametrize(("backend", "transport"), [("threads", "local"), ("processes", "collective")])
def test_ranks_that_need_no_gradient_take_part(backend, transport, wants, form):
    if backend == "processes" and len(wants) > 2:
        pytest.skip("two processes tell as much")
    for expected, got in launch(some_grad_rank, len(wants), wants, form, backend=backend):
        assert got is None or torch.equal(expected, got)


def no_grad_rank(group):
    x = random(5, HIDDEN, seed=0).requires_grad_(group.rank == 0)
    with communicator_of(group) as communicator, torch.no_grad():
        received = communicator.dispatch(x, ROUTES)
        return received.x.requires_grad or communicator.combine(received.x, received.handle).requires_grad


def test_nothing_is_recorded_without_gradients():
    assert launch(no_grad_rank, 2) == [False, False]


def incoming_rank(group):
    """Gradients come expanded, transposed, with steps between columns; rows of the experts come as views."""
    routes = ROUTES[mine(group)]
    x = random(routes.shape[0], HIDDEN, seed=1).requires_grad_()
    weights = random(*routes.shape, seed=2).requires_grad_()
    results = []
    with communicator_of(group) as communicator:
        for grad_of in (
            lambda out: torch.ones(1, 1, dtype=out.dtype).expand(out.shape),
            lambda out: torch.ones(out.shape[1], out.shape[0], dtype=out.dtype).t(),
            lambda out: torch.ones(out.shape[0], 2 * out.shape[1], dtype=out.dtype)[:, ::2],
            torch.ones_like,
        ):
            x.grad = weights.grad = None
            received = communicator.dispatch(x, routes, weights)
            y = torch.stack([received.x, received.x * received.topk_weights[:, None]], dim=2)[:, :, 1]
            out = communicator.combine(y, received.handle, weights)
            out.backward(grad_of(out))
            results.append((x.grad, weights.grad))
    return results


@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients_may_come_with_any_strides(ranks):
    for results in launch(incoming_rank, ranks):
        for grads in results[:-1]:
            assert all(torch.equal(one, other) for one, other in zip(grads, results[-1], strict=True))


# -- what may be changed in place ------------------------------------------------------------------------------------


def test_rows_in_use_for_the_weights_gradient_must_not_change():
    with solo() as communicator:
        x = random(5, HIDDEN, seed=1).requires_grad_()
        weights = random(5, TOPK, seed=2).requires_grad_()
        received = communicator.dispatch(x, ROUTES)
        y = received.x * 2
        out = communicator.combine(y, received.handle, weights)
        y.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        # The call it had no part in is counted: all is in step.
        communicator.combine(received.x, received.handle)


def test_rows_of_a_plain_sum_and_received_rows_may_change():
    with solo() as communicator:
        x = random(5, HIDDEN, seed=1).requires_grad_()
        weights = random(5, TOPK, seed=2).requires_grad_()
        received = communicator.dispatch(x, ROUTES, weights)
        y = received.x.mul_(3)
        carried = received.topk_weights.add_(1)
        out = communicator.combine(y, received.handle)
        y.detach().zero_()
        (out.add_(1).sum() + carried.sum()).backward()
        routes_per_token = (ROUTES >= 0).sum(dim=1, keepdim=True).double()
        assert torch.equal(x.grad, 3 * routes_per_token.expand(5, HIDDEN))
        assert torch.equal(weights.grad, (ROUTES >= 0).double())


# -- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", ["travelling", "at home"])
def test_weights_get_gradients_of_their_own_dtype(form, given, rows):
    exact = weights_dtype(rows)
    with solo() as communicator:
        x = random(5, HIDDEN, seed=1, dtype=rows).requires_grad_()
        weights = random(5, TOPK, seed=2, dtype=given).requires_grad_()
        kept = weights.detach().to(exact).requires_grad_()
        for used in (weights, kept):
            received = communicator.dispatch(x, ROUTES, used)
            if form == "at home":
                communicator.combine(received.x.sin(), received.handle, used).sum().backward()
            else:
                (received.x.to(exact) * received.topk_weights[:, None]).square().sum().backward()
        assert weights.grad.dtype == given
        assert torch.equal(weights.grad, kept.grad.to(given))
        assert (weights.grad[ROUTES < 0] == 0).all()


@pytest.mark.parametrize("rows", [torch.uint8, torch.float8_e4m3fn, torch.int32], ids=str)
@pytest.mark.parametrize("layout", ["expert_major", "flat"])
def test_weights_that_travel_with_rows_of_bytes_have_gradients(rows, layout):
    with solo() as communicator:
        x = torch.arange(15).reshape(5, 3).to(rows)
        weights = random(5, TOPK, seed=2, dtype=torch.float32).requires_grad_()
        received = communicator.dispatch(x, ROUTES, weights, layout=layout)
        assert received.x.dtype == rows
        assert not received.x.requires_grad
        factor = received.x.float().sum(dim=1).reshape(-1, *(1,) * (received.topk_weights.dim() - 1))
        (received.topk_weights * factor).sum().backward()
        assert torch.equal(weights.grad, (ROUTES >= 0) * x.float().sum(dim=1, keepdim=True))


# -- graphs ----------------------------------------------------------------------------------------------------------


def test_a_graph_may_be_walked_twice_and_not_after_it_was_freed():
    with solo() as communicator:
        x = random(5, HIDDEN, seed=1).requires_grad_()
        weights = random(5, TOPK, seed=2).requires_grad_()
        received = communicator.dispatch(x, ROUTES)
        out = communicator.combine(received.x.sin(), received.handle, weights).sum()
        out.backward(retain_graph=True)
        first = x.grad.clone(), weights.grad.clone()
        out.backward()
        assert torch.equal(x.grad, 2 * first[0])
        assert torch.equal(weights.grad, 2 * first[1])
        with pytest.raises(RuntimeError, match="second time"):
            out.backward()


def test_the_operator_itself_says_that_it_has_no_second_derivative():
    with solo() as communicator:
        grad, y = (random(5, HIDDEN, seed=seed).requires_grad_() for seed in (1, 2))
        routes = torch.arange(5)[:, None]
        handle = communicator.dispatch(grad.detach(), routes.expand(5, 1)).handle
        out, _ = torch.ops.moecomm.combine_adjoint(grad, y, torch.ones(5, 1, dtype=y.dtype), *spread(handle))
        with pytest.raises(RuntimeError, match="combine_adjoint cannot be differentiated again"):
            out.sum().backward()


def test_a_backward_after_close_says_so():
    with solo() as communicator:
        x = random(5, HIDDEN, seed=1).requires_grad_()
        received = communicator.dispatch(x, ROUTES)
        out = communicator.combine(received.x, received.handle)
    with pytest.raises(moecomm.CommunicatorClosed, match="was closed"):
        out.sum().backward()


def one_fails_rank(group):
    """One rank's graph is broken: its peers hear of it at once, and the next step works."""
    x = random(5, HIDDEN, seed=1).requires_grad_()
    weights = random(5, TOPK, seed=2).requires_grad_()
    with communicator_of(group) as communicator:
        received = communicator.dispatch(x, ROUTES)
        y = received.x * 2
        out = communicator.combine(y, received.handle, weights)
        if group.rank == 1:
            y.detach().add_(1)
        try:
            out.sum().backward()
        except (RuntimeError, moecomm.PeerFailed) as error:
            seen = f"{type(error).__name__}: {error}"
        received = communicator.dispatch(x, ROUTES)
        communicator.combine(received.x, received.handle, weights).sum().backward()
        return seen


def test_a_rank_whose_graph_is_broken_tells_its_peers():
    seen = launch(one_fails_rank, 3)
    assert "modified by an inplace operation" in seen[1]
    for rank in (0, 2):
        assert seen[rank].startswith("PeerFailed")
        assert "modified by an inplace operation" in seen[rank]
