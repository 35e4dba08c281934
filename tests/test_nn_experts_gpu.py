"""Experts on a GPU: every backend against the loops, at sizes and dtypes that no interpreter can do."""

import os

import pytest
import torch

from moecomm.kernels.experts import ExpertRows
from moecomm.kernels.registry import expert_kernels_for
from moecomm.nn import GroupedExperts
from moecomm.nn.backends import choose_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets: run this file by itself"),
]
DTYPES = [(torch.bfloat16, 2e-2), (torch.float16, 4e-3), (torch.float32, 1e-5)]


def error(have, want):
    return ((have.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)).item()


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("load", [[700, 0, 130, 1], [1, 2, 0, 3], [0, 0, 0, 0]])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
def test_outputs_and_gradients(backend, dtype, tolerance, load):
    torch.manual_seed(0)
    offsets = torch.tensor(load, device="cuda").cumsum(0).to(torch.int32)
    x = torch.randn(sum(load) + 5, 512, device="cuda").to(dtype)
    # Memory that comes next from the allocator holds NaN.
    torch.full((1 << 26,), float("nan"), device="cuda")
    results = []
    for name in ("loops", backend):
        experts = GroupedExperts(4, 512, 384, std=0.1, backend=name, dtype=dtype, device="cuda")
        if name == "torch":
            tensors = (x, experts.gate_up_proj, experts.down_proj)
            if (reason := expert_kernels_for(name).refusal(*tensors)) is not None:
                pytest.skip(reason)
        rows = x.clone().requires_grad_()
        y = experts(rows, offsets)
        y.float().square().sum().backward()
        assert (y[-5:] == 0).all()
        assert (rows.grad[-5:] == 0).all()
        results.append([y.detach(), rows.grad, experts.gate_up_proj.grad, experts.down_proj.grad])
        assert experts.chosen_backend == name or (name == "auto" and experts.chosen_backend in ("torch", "triton"))
    for want, have in zip(*results, strict=True):
        assert error(have, want) < tolerance
    for expert, count in enumerate(load):
        assert count or all((gradient[expert] == 0).all() for gradient in results[1][2:])


def test_a_captured_call_reads_new_offsets():
    experts = GroupedExperts(4, 256, 128, std=0.1, backend="triton", dtype=torch.bfloat16, device="cuda")
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor([10, 20, 30, 64], device="cuda", dtype=torch.int32)
    with torch.no_grad():
        experts(x, offsets)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = experts(x, offsets)
        for ends in ([0, 0, 64, 64], [1, 2, 3, 4]):
            offsets.copy_(torch.tensor(ends))
            graph.replay()
            assert torch.equal(y, experts(x, offsets))


def test_auto_keeps_its_choice(tmp_path):
    tensors = [torch.randn(shape, device="cuda").bfloat16() for shape in ((96, 320), (3, 128, 320), (3, 320, 64))]
    offsets = torch.tensor([30, 60, 96], device="cuda")
    chosen = choose_backend("auto", tensors[0], ExpertRows(96, offsets), tensors[1], down_proj=tensors[2], trains=True)
    assert chosen in ("torch", "triton")
    assert any('"experts"' in path.read_text().replace("\\", "") for path in tmp_path.rglob("*.json"))


def forms_of(device):
    """A slab and flat rows, as arguments of the module."""
    generator = torch.Generator().manual_seed(0)
    slab, x = torch.randn(4, 40, 256, generator=generator), torch.randn(70, 256, generator=generator)
    ids = torch.randint(-1, 4, (70, 3), generator=generator)
    weights = torch.rand(70, 3, generator=generator)
    yield slab.to(device, torch.bfloat16), {"num_tokens_per_expert": torch.tensor([40, 0, 7, 1], device=device)}
    yield x.to(device, torch.bfloat16), {"topk_idx": ids.to(device), "topk_weights": weights.to(device)}


@pytest.mark.parametrize("backend", ["auto", "loops", "torch", "triton"])
def test_slabs_and_flat_rows_as_on_the_cpu(backend):
    results = []
    for device in ("cpu", "cuda"):
        results.append([])
        for x, form in forms_of(device):
            experts = GroupedExperts(4, 256, 128, std=0.1, dtype=torch.bfloat16)
            experts.backend = "loops" if device == "cpu" else backend
            experts = experts.to(device)
            leaf = x.clone().requires_grad_()
            y = experts(leaf, **form)
            y.float().square().sum().backward()
            results[-1] += [y.detach(), leaf.grad, experts.gate_up_proj.grad, experts.down_proj.grad]
    for want, have in zip(*results, strict=True):
        assert error(have.cpu(), want) < 3e-2


def test_captured_slabs_and_flat_rows_read_new_counts_and_ids():
    experts = GroupedExperts(4, 256, 128, std=0.1, backend="triton", dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        for x, form in forms_of("cuda"):
            experts(x, **form)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = experts(x, **form)
            routing = next(iter(form.values()))
            for values in (torch.zeros_like(routing), routing.flip(0)):
                routing.copy_(values)
                graph.replay()
                assert torch.equal(y, experts(x, **form))
