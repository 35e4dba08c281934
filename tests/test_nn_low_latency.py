"""The layer in low-latency mode: the same bits as in throughput mode, forward and backward, switched at run time."""

import pytest
import torch

import moecomm
from moecomm.nn import GroupedExperts, MoELayer, TopKRouter, grouped_swiglu, set_mode
from moecomm.testing import launch

HIDDEN, INTERMEDIATE, EXPERTS, TOPK, MOST = 12, 10, 6, 3, 9
TOKENS = {1: [7], 2: [5, 9], 3: [4, 0, 6]}


def generator(seed):
    return torch.Generator().manual_seed(seed)


def make_layer(group, *, with_shared=True, experts=EXPERTS, mode="throughput"):
    communicator = moecomm.Communicator(
        group, num_experts=experts, hidden=HIDDEN, num_topk=TOPK, max_tokens_per_rank=MOST
    )
    router = TopKRouter(HIDDEN, experts, TOPK)
    torch.nn.init.normal_(router.weight, std=0.3, generator=generator(1))
    shared = torch.nn.Linear(HIDDEN, HIDDEN)
    torch.nn.init.normal_(shared.weight, std=0.3, generator=generator(2))
    torch.nn.init.zeros_(shared.bias)
    grouped = GroupedExperts.for_communicator(communicator, INTERMEDIATE, std=0.3)
    return MoELayer(router, grouped, shared if with_shared else None, communicator=communicator, mode=mode)


def forward_and_backward(layer, num_tokens, seed):
    x = torch.randn(num_tokens, HIDDEN, generator=generator(seed)).requires_grad_()
    mask = torch.arange(num_tokens) % 4 == 3
    layer.zero_grad()
    out = layer(x, mask)
    out.backward(torch.randn(out.shape, generator=generator(seed + 1)))
    gradients = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    with torch.no_grad():
        assert torch.equal(layer(x, mask), out)
    return {"out": out.detach(), "x": x.grad, **gradients}


def both_modes(group, num_tokens, with_shared, experts):
    layer = make_layer(group, with_shared=with_shared, experts=experts)
    with layer.communicator:
        results = []
        for mode in ("throughput", "low_latency", "throughput", "low_latency"):
            set_mode(torch.nn.Sequential(layer), mode)
            results.append(forward_and_backward(layer, num_tokens[group.rank], 10 * group.rank + 3))
        return results


@pytest.mark.parametrize("with_shared", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_both_modes_give_the_same_bits(ranks, with_shared):
    for first, *others in launch(both_modes, ranks, TOKENS[ranks], with_shared, EXPERTS):
        assert not first["out"].isnan().any()
        for other in others:
            for name, value in first.items():
                assert torch.equal(other[name], value), name


@pytest.mark.parametrize("num_tokens", [[0, 0, 0], [0, 0, 2], [9, 1, 0]])
def test_no_tokens_on_ranks_and_more_ranks_than_experts_allow(num_tokens):
    for first, *others in launch(both_modes, 3, num_tokens, False, TOPK):
        for other in others:
            for name, value in first.items():
                assert torch.equal(other[name], value), name


def test_processes_agree_with_threads():
    threads = launch(both_modes, 2, TOKENS[2], True, EXPERTS)
    processes = launch(both_modes, 2, TOKENS[2], True, EXPERTS, backend="processes")
    for one, other in zip(threads, processes, strict=True):
        assert torch.equal(one[1]["out"], other[1]["out"])


def too_many_tokens(group):
    layer = make_layer(group, mode="low_latency")
    with layer.communicator, torch.no_grad():
        with pytest.raises(ValueError, match=f"at most max_tokens_per_rank={MOST}"):
            layer(torch.randn(MOST + 1, HIDDEN))
        layer.mode = "throughput"
        return layer(torch.randn(MOST + 1, HIDDEN)).shape


def test_more_tokens_than_agreed_are_refused():
    assert launch(too_many_tokens, 1) == [(MOST + 1, HIDDEN)]


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match=r"mode must be one of \['throughput', 'low_latency'\], got 'fast'"):
        set_mode(torch.nn.Linear(1, 1), "fast")
    layer = make_layer(None)
    with layer.communicator, pytest.raises(ValueError, match="got 'fast'"):
        MoELayer(layer.router, layer.experts, communicator=layer.communicator, mode="fast")


def compiled_step(group):
    layer = make_layer(group, with_shared=False, mode="low_latency")
    with layer.communicator:
        x = torch.randn(5, HIDDEN, generator=generator(group.rank))
        eager = forward_and_backward(layer, 5, group.rank)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            return torch.equal(compiled(x), layer(x)), eager["x"].isfinite().all().item()


def test_it_is_traced_as_one_graph():
    assert launch(compiled_step, 1) == [(True, True)]


# -- rows beyond the last expert's ------------------------------------------------------------------------------------


def weights(seed=5):
    gate_up = torch.randn(3, 2 * INTERMEDIATE, HIDDEN, generator=generator(seed))
    return gate_up.requires_grad_(), torch.randn(3, HIDDEN, INTERMEDIATE, generator=generator(seed)).requires_grad_()


@pytest.mark.parametrize("given", [True, False])
def test_rows_beyond_the_offsets_cost_nothing_and_change_nothing(given):
    offsets = torch.tensor([2, 2, 6], dtype=torch.int32)
    results = []
    for num_rows in (6, 20):
        gate_up, down = weights()
        x = torch.randn(6, HIDDEN, generator=generator(6))
        x = torch.cat([x, torch.full((num_rows - 6, HIDDEN), torch.nan)]).requires_grad_()
        out = torch.full((num_rows, HIDDEN), 7.0) if given else None
        y = grouped_swiglu(x, offsets, gate_up, down_proj=down, out=out)
        y.backward(torch.cat([torch.ones(6, HIDDEN), torch.full((num_rows - 6, HIDDEN), torch.nan)]))
        assert (y[6:] == (7.0 if given else 0.0)).all()
        assert (x.grad[6:] == 0).all()
        results.append([y[:6].detach(), x.grad[:6], gate_up.grad, down.grad])
    for short, long in zip(*results, strict=True):
        assert torch.equal(short, long)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_by_row_a_row_does_not_depend_on_the_others(dtype):
    experts = GroupedExperts(2, HIDDEN, INTERMEDIATE, std=0.3, dtype=dtype, row_by_row=True)
    x = torch.randn(9, HIDDEN, generator=generator(7)).to(dtype)
    with torch.no_grad():
        together = experts(x, torch.tensor([5, 9]))
        for row in range(9):
            alone = experts(x[row : row + 1], torch.tensor([1, 1] if row < 5 else [0, 1]))
            assert torch.equal(alone[0], together[row])
        padded = experts(x, torch.tensor([5, 7]))
        assert torch.equal(padded[:7], together[:7])
        assert (padded[7:] == 0).all()
        experts.row_by_row = False
        torch.testing.assert_close(experts(x, torch.tensor([5, 9])), together)


def test_row_by_row_is_for_inference():
    experts = GroupedExperts(1, HIDDEN, INTERMEDIATE, row_by_row=True)
    with pytest.raises(ValueError, match="row_by_row must be False where gradients are enabled"):
        experts(torch.randn(2, HIDDEN), torch.tensor([2]))
