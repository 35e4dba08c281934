"""The layer on 1 to 4 ranks against the same model written densely in one process; its promises one by one."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import moecomm
from moecomm.nn import (
    GroupedExperts,
    MoELayer,
    TopKRouter,
    clip_grad_norm,
    dense_parameters,
    expert_parameters,
    keep_exchanges,
    synchronize_gradients,
    take_aux_loss,
)
from moecomm.testing import launch

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 12, 10, 6, 3
TOKENS = {1: [7], 2: [5, 9], 3: [4, 0, 6], 4: [6, 0, 1, 12]}


def generator(seed):
    return torch.Generator().manual_seed(seed)


def make_router(dtype=torch.float32, **options):
    router = TopKRouter(HIDDEN, EXPERTS, TOPK, dtype=dtype, **options)
    torch.nn.init.normal_(router.weight, std=0.3, generator=generator(1))
    return router


def make_shared(dtype=torch.float32):
    shared = torch.nn.Linear(HIDDEN, HIDDEN, dtype=dtype)
    torch.nn.init.normal_(shared.weight, std=0.3, generator=generator(2))
    torch.nn.init.normal_(shared.bias, std=0.3, generator=generator(3))
    return shared


def make_communicator(group):
    return moecomm.Communicator(group, num_experts=EXPERTS, hidden=HIDDEN, num_topk=TOPK)


def make_layer(communicator, *, with_shared=True, dtype=torch.float32, **router_options):
    experts = GroupedExperts.for_communicator(communicator, INTERMEDIATE, std=0.3, dtype=dtype)
    shared = make_shared(dtype) if with_shared else None
    return MoELayer(make_router(dtype, **router_options), experts, shared, communicator=communicator)


def tokens_of(ranks, rank, dtype=torch.float32):
    """This rank's rows and the gradient of its outputs: parts of one batch."""
    num = TOKENS[ranks]
    x, grad = torch.randn(2, sum(num), HIDDEN, generator=generator(4), dtype=torch.float64).to(dtype)
    return x.split(num)[rank].clone().requires_grad_(), grad.split(num)[rank]


class Dense(torch.nn.Module):
    """Every expert on every token, in one process, with nothing of the layer but the router's choice rule."""

    def __init__(self, dtype=torch.float32, with_shared=True):
        super().__init__()
        experts = GroupedExperts(EXPERTS, HIDDEN, INTERMEDIATE, std=0.3, dtype=dtype)
        self.gate = torch.nn.Parameter(make_router(dtype).weight.detach().clone())
        self.gate_up = torch.nn.Parameter(experts.gate_up_proj.detach().clone())
        self.down = torch.nn.Parameter(experts.down_proj.detach().clone())
        self.shared = make_shared(dtype) if with_shared else None

    def forward(self, x):
        scores = (x @ self.gate.t()).softmax(1)
        top = scores.topk(TOPK, dim=1)
        weights = top.values / top.values.sum(1, keepdim=True)
        every = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(1, top.indices, weights)
        gate, up = torch.einsum("th,eih->tei", x, self.gate_up).chunk(2, dim=2)
        outputs = torch.einsum("tei,ehi->teh", F.silu(gate) * up, self.down)
        out = (every.unsqueeze(2) * outputs).sum(1)
        return out if self.shared is None else out + self.shared(x)


def run_layer(group, dtype):
    x, grad = tokens_of(group.size, group.rank, dtype)
    with make_communicator(group) as communicator:
        layer = make_layer(communicator, dtype=dtype)
        out = layer(x)
        out.backward(grad)
        return {
            "out": out.detach(),
            "x": x.grad,
            "gate": layer.router.weight.grad,
            "gate_up": layer.experts.gate_up_proj.grad,
            "down": layer.experts.down_proj.grad,
            "shared": layer.shared_expert.weight.grad,
        }


def relative(have, want):
    return ((have - want).norm() / want.norm()).item()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_outputs_and_all_gradients_equal_one_process(ranks, dtype, tolerance):
    parts = launch(run_layer, ranks, dtype)
    dense = Dense(dtype)
    batch = [tokens_of(ranks, rank, dtype) for rank in range(ranks)]
    x = torch.cat([x.detach() for x, _ in batch]).requires_grad_()
    out = dense(x)
    out.backward(torch.cat([grad for _, grad in batch]))
    # Rows are each rank's own, experts stand in rank order, replicated parts hold each rank's share of the sum.
    for name, want in {
        "out": out.detach(),
        "x": x.grad,
        "gate_up": dense.gate_up.grad,
        "down": dense.down.grad,
    }.items():
        assert relative(torch.cat([part[name] for part in parts]), want) < tolerance, name
    for name, want in {"gate": dense.gate.grad, "shared": dense.shared.weight.grad}.items():
        assert relative(sum(part[name] for part in parts), want) < tolerance, name


@pytest.mark.parametrize("ranks", [2, 4])
def test_real_processes_agree_with_threads(ranks):
    for threads, processes in zip(
        launch(run_layer, ranks, torch.float32),
        launch(run_layer, ranks, torch.float32, backend="processes"),
        strict=True,
    ):
        for name, value in threads.items():
            torch.testing.assert_close(processes[name], value, rtol=1e-6, atol=1e-7)


def silent_rank(group, steps):
    with make_communicator(group) as communicator:
        layer = make_layer(communicator)
        with torch.no_grad():
            # All tokens on experts of rank 0, and no tokens on the last rank.
            layer.router.weight.zero_()
            layer.router.weight[:TOPK] = 1.0
        for step in range(steps):
            num = 0 if group.rank == group.size - 1 else 4
            x = torch.rand(num, HIDDEN, generator=generator(step)).requires_grad_()
            out = layer(x)
            assert out.requires_grad
            out.sum().backward()
        return [None if p.grad is None else p.grad.abs().sum().item() for p in expert_parameters(layer)]


def test_ranks_without_tokens_or_rows_take_part_and_get_zero_gradients():
    sums = launch(silent_rank, 2, 3)
    assert all(value > 0 for value in sums[0])
    assert sums[1] == [0.0, 0.0]


def padded(group):
    x, _ = tokens_of(group.size, group.rank)
    x = x.detach().view(1, -1, HIDDEN)
    mask = torch.zeros(1, x.shape[1], dtype=torch.bool)
    mask[:, 2:] = True
    with make_communicator(group) as communicator:
        layer = make_layer(communicator, with_shared=False)
        out = layer(x, mask)
        load = layer.last_router_output.num_tokens_per_expert
        return (out[mask] == 0).all(), out[~mask].detach(), load.sum().item(), int((~mask).sum())


def test_padding_reaches_no_expert():
    dense = Dense(with_shared=False)
    for rank, (is_zero, kept, load, num) in enumerate(launch(padded, 2)):
        assert is_zero
        assert load == num * TOPK
        torch.testing.assert_close(kept, dense(tokens_of(2, rank)[0][:2]).detach())


def trained_steps(group, num_parts):
    """A few optimizer steps on one global batch, spread as the ranks say; returns the parameters as one model."""
    parts = TOKENS[4]
    x, target = torch.randn(2, sum(parts), HIDDEN, generator=generator(5))
    mine = range(group.rank, num_parts, group.size)
    take = torch.cat([torch.arange(sum(parts)).split(parts)[part] for part in mine])
    with make_communicator(group) as communicator:
        layer = make_layer(communicator, balance_coefficient=0.1, z_coefficient=0.01, loss_group=group)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        norms = []
        for _ in range(3):
            # The mean over all tokens, as a mean over ranks; see the layer's docstring.
            loss = (layer(x[take]) - target[take]).square().sum() * group.size / sum(parts)
            (loss + take_aux_loss(layer)).backward()
            synchronize_gradients(layer, group)
            norms.append(clip_grad_norm(layer, 1.0, group=group))
            optimizer.step()
            optimizer.zero_grad()
        assert layer.gradient_divide_factor == group.size
        return layer.state_dict(), torch.stack(norms)


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_does_not_depend_on_the_number_of_ranks(ranks):
    ((whole, norms),) = launch(trained_steps, 1, 4)
    parts = launch(trained_steps, ranks, 4)
    merged = {key: value for state, _ in parts for key, value in state.items()}
    assert merged.keys() == whole.keys()
    for key, value in whole.items():
        assert relative(merged[key], value) < 1e-5, key
    for state, own in parts:
        torch.testing.assert_close(own, norms, rtol=1e-5, atol=0)
        assert torch.equal(state["router.weight"], merged["router.weight"])


def checkpointed(group, options):
    x, grad = tokens_of(group.size, group.rank)
    with make_communicator(group) as communicator:
        layer = make_layer(communicator, balance_coefficient=0.1)
        plain = layer(x)
        (plain * grad).sum().backward()
        take_aux_loss(layer)
        expected = [x.grad.clone(), *(p.grad.clone() for p in layer.parameters())]
        x.grad = None
        layer.zero_grad()
        before = communicator.stats["announcements"]
        out = checkpoint(layer, x, use_reentrant=False, **options)
        aux = take_aux_loss(layer)
        assert aux.requires_grad
        (out * grad).sum().backward()
        same = [
            torch.equal(have, want)
            for have, want in zip([x.grad, *(p.grad for p in layer.parameters())], expected, strict=True)
        ]
        return torch.equal(out, plain), same, take_aux_loss(layer).item(), communicator.stats["announcements"] - before


@pytest.mark.parametrize(("options", "num_announcements"), [({}, 2), ({"context_fn": keep_exchanges}, 1)])
def test_activation_checkpointing_changes_nothing_and_leaves_no_graph_behind(options, num_announcements):
    for same_out, same_gradients, left, announcements in launch(checkpointed, 2, options):
        assert same_out
        assert all(same_gradients)
        assert left == 0
        assert announcements == num_announcements


def under_autocast(group):
    x, grad = tokens_of(group.size, group.rank)
    with make_communicator(group) as communicator:
        layer = make_layer(communicator)
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
        out.backward(grad.to(out.dtype))
        routes = layer.last_router_output.topk_idx
        return out.detach(), x.grad, routes


def test_autocast_moves_bf16_rows_and_keeps_the_fp32_choice():
    dense = Dense()
    for rank, (out, x_grad, routes) in enumerate(launch(under_autocast, 2)):
        x, grad = tokens_of(2, rank)
        want = dense(x)
        want.backward(grad)
        assert out.dtype == torch.bfloat16
        assert x_grad.dtype == torch.float32
        assert relative(out.float(), want.detach()) < 2e-2
        assert relative(x_grad, x.grad) < 3e-2
        assert torch.equal(routes, (x @ dense.gate.t()).topk(TOPK, dim=1).indices)


def compiled(group):
    x, grad = tokens_of(group.size, group.rank)
    with make_communicator(group) as communicator:
        layer = make_layer(communicator)
        results = []
        for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
            x.grad = None
            layer.zero_grad()
            out = run(x)
            out.backward(grad)
            results.append([out.detach(), x.grad.clone(), *(p.grad.clone() for p in layer.parameters())])
        return [torch.equal(one, other) for one, other in zip(*results, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_layer_agrees_with_eager(ranks):
    for same in launch(compiled, ranks, backend="processes" if ranks > 1 else "threads", timeout=120):
        assert all(same)


def compile_count(group):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    with make_communicator(group) as communicator:
        layer = make_layer(communicator)
        compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
        counts = []
        for num_tokens in (5, 9, 17, 4, 30):
            x = torch.randn(num_tokens, HIDDEN, generator=generator(6))
            torch.testing.assert_close(compiled(x), layer(x))
            counts.append(counter.frame_count)
    return counts


def test_other_numbers_of_tokens_compile_nothing_again():
    (counts,) = launch(compile_count, 1)
    assert len(set(counts)) == 1


def saved(group):
    with make_communicator(group) as communicator:
        layer = make_layer(communicator)
        x, _ = tokens_of(4, 3)
        return {key: value.clone() for key, value in layer.state_dict().items()}, layer(x).detach()


def loaded(group, state):
    with make_communicator(group) as communicator:
        layer = make_layer(communicator)
        for parameter in layer.parameters():
            torch.nn.init.zeros_(parameter)
        layer.load_state_dict(state)
        return layer(tokens_of(4, 3)[0]).detach()


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_state_saved_on_two_ranks_loads_on_any_number(ranks):
    parts = launch(saved, 2)
    merged = {key: value for state, _ in parts for key, value in state.items()}
    assert sum(key.startswith("experts.") for key in merged) == 2 * EXPERTS
    for out in launch(loaded, ranks, merged):
        assert torch.equal(out, parts[0][1])


def test_parts_that_do_not_fit_are_named():
    with make_communicator(moecomm.SoloGroup()) as communicator:
        experts = GroupedExperts.for_communicator(communicator, INTERMEDIATE)
        with pytest.raises(ValueError, match="router.num_experts must be 6 as in the communicator, got 8"):
            MoELayer(TopKRouter(HIDDEN, 8, TOPK), experts, communicator=communicator)
        with pytest.raises(ValueError, match=r"experts.expert_ids must be \(0, 1, 2, 3, 4, 5\)"):
            MoELayer(make_router(), GroupedExperts(3, HIDDEN, INTERMEDIATE), communicator=communicator)
        layer = make_layer(communicator)
        assert len(dense_parameters(layer)) == 3
        assert len(expert_parameters(layer)) == 2
        with pytest.raises(ValueError, match=r"hidden = 12\], got \[2, 3\]"):
            layer(torch.zeros(2, 3))
