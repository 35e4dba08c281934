"""The torch operators: held to torch's own checks, and compiled: one graph, eager's bits, few compilations.

T tokens of a rank   H hidden   K top-k   E experts   R ranks   N rows received here
"""

import shutil

import pytest
import torch
from gradient_cases import EXPERTS, HIDDEN, ROUTES, TOPK, communicator_of, random, solo
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import fresh_cache
from torch._subclasses import FakeTensorMode

import moecomm
from moecomm.testing import launch

OPS = torch.ops.moecomm
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
TRACED = ("test_aot_dispatch_static", "test_aot_dispatch_dynamic")
FORMS = [
    ("throughput", "expert_major", None),
    ("throughput", "flat", None),
    ("throughput", "expert_major", 40),
    ("throughput", "flat", 9),
    ("low_latency", "slab", None),
    ("low_latency", "expert_major", None),
]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def communicator():
    with solo() as made:
        yield made


def wanting(*tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def arguments_of(handle):
    parts = (handle.routes, handle.topk_idx, handle.counts, handle.stamp)
    form = (handle.mode, handle.layout, handle.capacity, handle.expert_alignment)
    return (*parts, *form, handle.communicator)


# -- torch's checks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "layout", "capacity"), FORMS)
@pytest.mark.parametrize("weighted", [False, True])
def test_dispatch_passes_opcheck(communicator, mode, layout, capacity, weighted):
    received = communicator.dispatch(random(5, HIDDEN, seed=1), ROUTES, mode=mode, layout=layout, capacity=capacity)
    *form, num_rows, alignment, comm = arguments_of(received.handle)[4:]
    x, weights = wanting(random(5, HIDDEN, seed=1), random(5, TOPK, seed=2))
    sizes = (1, EXPERTS, EXPERTS)
    arguments = (x, ROUTES, weights if weighted else None, *form, num_rows or None, alignment, comm, *sizes)
    # Not its other checks, which compare all outputs of two calls: the handle's stamp numbers the calls.
    torch.library.opcheck(OPS.dispatch.default, arguments, test_utils=CHECKS)


@pytest.mark.parametrize(("mode", "layout", "capacity"), FORMS)
def test_operators_with_a_handle_pass_opcheck(communicator, mode, layout, capacity):
    received = communicator.dispatch(
        random(5, HIDDEN, seed=1), ROUTES, random(5, TOPK, seed=2), mode=mode, layout=layout, capacity=capacity
    )
    handle = received.handle
    known = arguments_of(handle)
    carried = received.topk_weights if layout == "flat" else received.topk_weights.reshape(-1)
    x, weights, y, values = wanting(
        random(5, HIDDEN, seed=1), random(5, TOPK, seed=2), received.x.reshape(-1, HIDDEN), carried
    )
    sizes = (handle.num_rows, EXPERTS)
    for operator, arguments in (
        (OPS.dispatch_cached, (x, None, *known, *sizes)),
        (OPS.dispatch_cached, (x, weights, *known, *sizes)),
        (OPS.combine, (y, None, None, *known)),
        (OPS.combine, (y, None, values, *known)),
        *(() if layout == "flat" else ((OPS.combine, (y, weights, None, *known)),)),
        *(() if layout == "flat" else ((OPS.combine_adjoint, (x.detach(), y.detach(), weights.detach(), *known)),)),
    ):
        torch.library.opcheck(operator.default, arguments, test_utils=(*CHECKS, *TRACED))


def test_shapes_follow_from_the_arguments_alone():
    """A compiled graph that is kept on disk must not hold what another communicator had."""
    with FakeTensorMode() as mode:
        x, routes = torch.empty(7, 16), torch.empty(7, 2, dtype=torch.int64)
        nowhere = 10**6
        outputs = OPS.dispatch(x, routes, None, "low_latency", "slab", 9, 1, nowhere, 4, 10, 3)
        assert [tuple(one.shape) for one in outputs] == [
            (27, 16),
            (0,),
            (0,),
            (3,),
            (3,),
            (7, 2),
            (7, 2),
            (4, 14),
            (2,),
        ]
        outputs = OPS.dispatch(x, routes, torch.empty(7, 2), "throughput", "flat", 40, 1, nowhere, 4, 10, 3)
        assert [tuple(one.shape) for one in outputs[:5]] == [(40, 16), (40, 2), (40, 2), (3,), (3,)]
        handle = (outputs[5], outputs[6], outputs[7], outputs[8], "throughput", "flat", 0, 1, nowhere)
        outputs = OPS.dispatch_cached(x, torch.empty(7, 2), *handle, 11, 3)
        assert [tuple(one.shape) for one in outputs] == [(11, 16), (11, 2), (11, 2), (3,), (3,)]
        sums, home = OPS.combine(torch.empty(11, 16), None, torch.empty(11, 2), *handle)
        assert (sums.shape, home.shape) == ((7, 16), (7, 2))
    assert mode.shape_env is None


def test_an_operator_of_a_closed_communicator_says_so():
    with solo() as communicator:
        received = communicator.dispatch(random(5, HIDDEN, seed=1), ROUTES)
    with pytest.raises(moecomm.CommunicatorClosed, match="was closed before the call"):
        OPS.combine(received.x, None, None, *arguments_of(received.handle))


# -- compiled --------------------------------------------------------------------------------------------------------


def at_home(communicator, x, routes, weights, scale):
    received = communicator.dispatch(x, routes)
    return communicator.combine(torch.sin(received.x) * scale, received.handle, weights)


def travelling(communicator, x, routes, weights, scale):
    received = communicator.dispatch(x, routes, weights, expert_alignment=4)
    return communicator.combine(torch.sin(received.x) * scale * received.topk_weights[:, None], received.handle)


def flat_and_cached(communicator, x, routes, weights, scale):
    received = communicator.dispatch(x, routes, weights, layout="flat")
    again = communicator.dispatch(x * 2, handle=received.handle)
    gate = received.topk_weights.sum(dim=1, keepdim=True)
    return communicator.combine(received.x * gate + again.x * scale, received.handle)


def capped(communicator, x, routes, weights, scale):
    received = communicator.dispatch(x, routes, weights, expert_alignment=2, capacity=48)
    assert received.x.shape == (48, HIDDEN)  # no size of a compiled graph depends on what arrives
    flat = communicator.dispatch(x, routes, weights, layout="flat", capacity=9)
    gate = flat.topk_weights.sum(dim=1, keepdim=True)
    y = torch.sin(received.x) * scale * received.topk_weights[:, None]
    return communicator.combine(y, received.handle, weights) + communicator.combine(flat.x * gate, flat.handle)


def slab(communicator, x, routes, weights, scale):
    received = communicator.dispatch(x, routes, weights, mode="low_latency")
    y = torch.sin(received.x) * scale * received.topk_weights[:, :, None]
    return communicator.combine(y, received.handle, weights)


def asynchronous(communicator, x, routes, weights, scale):
    received = communicator.dispatch_async(x, routes).wait()
    work = communicator.combine_async(torch.sin(received.x), received.handle, weights)
    return x * scale + work.wait()


def results(function, communicator, rank=0, num_tokens=5, grad=True):
    x, weights, scale = (
        random(num_tokens, HIDDEN, seed=rank),
        random(num_tokens, TOPK, seed=10 + rank),
        random(1, seed=20),
    )
    if grad:
        x, weights, scale = wanting(x, weights, scale)
    routes = ROUTES.roll(rank, 0).repeat(num_tokens // 5 + 1, 1)[:num_tokens]
    out = function(communicator, x, routes, weights, scale)
    if not grad:
        return [out]
    out.square().sum().backward()
    return [out.detach(), x.grad, weights.grad, scale.grad]


def same(one, other):
    return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]


WAYS = [at_home, travelling, flat_and_cached, capped, slab, asynchronous]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_one_graph_with_the_bits_of_eager(communicator, way, grad):
    compiled = torch.compile(way, fullgraph=True, backend="aot_eager")
    assert all(same(results(compiled, communicator, grad=grad), results(way, communicator, grad=grad)))
    with torch.no_grad():
        assert all(same(results(compiled, communicator, grad=False), results(way, communicator, grad=False)))


def compiled_rank(group, way, num_tokens):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(way, fullgraph=True, backend=counter)
    outcome = []
    with communicator_of(group) as communicator:
        for step in range(4):
            number = num_tokens[(step + group.rank) % len(num_tokens)]
            eager = results(way, communicator, group.rank, number)
            outcome += same(results(compiled, communicator, group.rank, number), eager)
    return all(outcome), counter.frame_count


@pytest.mark.parametrize("way", [at_home, travelling])
def test_ranks_compile_the_same_graph_for_different_numbers_of_tokens(way):
    # Not in step: where one rank compiles anew, the other does not.
    for is_same, compilations in launch(compiled_rank, 2, way, (5, 3, 0, 4), backend="processes", timeout=120):
        assert is_same
        assert compilations <= 3


@pytest.mark.parametrize("marked", [False, True])
def test_few_compilations_for_many_numbers_of_tokens(communicator, marked):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(at_home, fullgraph=True, backend=counter)

    def call(communicator, x, routes, weights, scale):
        if marked:
            for tensor in (x, routes, weights):
                torch._dynamo.mark_dynamic(tensor, 0)
        return compiled(communicator, x, routes, weights, scale)

    for num_tokens in (5, 2, 4, 3, 5):
        assert all(same(results(call, communicator, 0, num_tokens), results(at_home, communicator, 0, num_tokens)))
    # The first number of tokens by itself, then all; all at once where they are marked as dynamic.
    assert counter.frame_count == (1 if marked else 2)


def test_two_communicators_in_one_graph_and_one_graph_each(communicator):
    counter = CompileCounterWithBackend("aot_eager")
    with solo(num_experts=7) as other:

        def both(_, *arguments):
            return at_home(communicator, *arguments) + travelling(other, *arguments)

        compiled = torch.compile(both, fullgraph=True, backend=counter)
        assert all(same(results(compiled, None), results(both, None)))
        counter.clear()
        compiled = torch.compile(at_home, fullgraph=True, backend=counter)
        for _ in range(3):
            for each in (communicator, other):
                assert all(same(results(compiled, each), results(at_home, each)))
    assert counter.frame_count == 2


def test_a_compiled_function_of_a_closed_communicator_says_so():
    compiled = torch.compile(at_home, fullgraph=True, backend="aot_eager")
    with solo() as communicator:
        results(compiled, communicator)
    with pytest.raises(moecomm.CommunicatorClosed, match="was closed before the call"):
        results(compiled, communicator)
    torch._dynamo.reset()
    with pytest.raises(moecomm.CommunicatorClosed, match="was closed before the call"):
        results(compiled, communicator, grad=False)


def test_mistakes_in_a_compiled_function_are_named(communicator):
    def strange(communicator, x, routes, weights, scale):
        return communicator.dispatch(x, routes, mode="fast").x * scale

    def shapeless(communicator, x, routes, weights, scale):
        return communicator.dispatch(x, routes, capacity=-1).x * scale

    def twice_fixed(communicator, x, routes, weights, scale):
        return communicator.dispatch(x, routes, mode="low_latency", capacity=48).x * scale

    def empty(communicator, x, routes, weights, scale):
        return communicator.dispatch(x, routes, capacity=0).x * scale

    for wrong, message in (
        (empty, r"capacity must be in \[1, 2147483647\].*got 0"),
        (strange, "mode: unknown 'fast'"),
        (shapeless, r"capacity must be in \[1, 2147483647\].*got -1"),
        (twice_fixed, "capacity must be None in mode 'low_latency'.*got 48"),
    ):
        with pytest.raises(ValueError, match=message):
            results(torch.compile(wrong, fullgraph=True, backend="aot_eager"), communicator)
    routes = ROUTES.clone()
    routes[2, 1] = EXPERTS
    compiled = torch.compile(at_home, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=rf"topk_idx\[2, 1\] = {EXPERTS} is not an expert"):
        compiled(communicator, random(5, HIDDEN, seed=1), routes, random(5, TOPK, seed=2), torch.ones(1))
    assert all(same(results(compiled, communicator), results(at_home, communicator)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": True}, "capacity must be an int or None, got bool"),
        ({"expert_alignment": True}, "expert_alignment must be an int, got bool"),
        ({"mode": "low_latency", "capacity": "its own"}, "capacity must be None in mode 'low_latency'"),
    ],
)
def test_what_an_operator_cannot_see_is_refused_as_it_is_traced(communicator, options, message):
    if options.get("capacity") == "its own":
        own = communicator.dispatch(random(5, HIDDEN, seed=1), ROUTES, mode="low_latency").handle.capacity
        options = options | {"capacity": own}

    def wrong(x, routes):
        return communicator.dispatch(x, routes, **options).x

    for function in (wrong, torch.compile(wrong, fullgraph=True, backend="aot_eager")):
        with pytest.raises((TypeError, ValueError, torch._dynamo.exc.Unsupported), match=message):
            function(random(5, HIDDEN, seed=1), ROUTES)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="inductor needs a C++ compiler")
def test_inductor(communicator):
    # One kernel, for which precompiled headers would cost more than they save.
    with fresh_cache(), torch._inductor.config.patch(cpp_cache_precompile_headers=False):
        (got,) = results(torch.compile(at_home, fullgraph=True), communicator, grad=False)
    (want,) = results(at_home, communicator, grad=False)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
