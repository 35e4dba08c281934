"""Experts on what slab and flat dispatches give, without Triton: every backend, the compiler, whole exchanges."""

import pytest
import torch
from expert_layouts import (
    CAPACITY,
    COUNTS,
    EXPERTS,
    FLATS,
    HIDDEN,
    TOKENS,
    TOPK,
    check_flat,
    check_slab,
    ids_of,
    make_experts,
)

from moecomm import Communicator
from moecomm.kernels import flat_rows
from moecomm.nn import GroupedExperts, grouped_swiglu
from moecomm.testing import launch, masked

PRECISIONS = [
    ("loops", torch.float64, 1e-12),
    ("loops", torch.float32, 1e-5),
    ("loops", torch.bfloat16, 3e-2),
    ("torch", torch.float32, 1e-5),
    ("torch", torch.bfloat16, 3e-2),
]


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize(("backend", "dtype", "tolerance"), PRECISIONS)
def test_slab(backend, dtype, tolerance, kind, with_out):
    check_slab(backend, dtype, tolerance, kind, with_out=with_out)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("kind", FLATS)
@pytest.mark.parametrize(("backend", "dtype", "tolerance"), PRECISIONS)
def test_flat(backend, dtype, tolerance, kind, with_out, is_weighted):
    check_flat(backend, dtype, tolerance, kind, with_out=with_out, is_weighted=is_weighted)


@pytest.mark.parametrize("hidden", [1, 7])
def test_any_width(hidden):
    check_slab("loops", torch.float32, 1e-5, "mixed", hidden=hidden)
    check_flat("loops", torch.float32, 1e-5, "mixed", hidden=hidden)


@pytest.mark.parametrize("backend", ["loops", "torch"])
@pytest.mark.parametrize("num_experts", [0, 2])
def test_no_rows_keep_the_graph(backend, num_experts):
    experts = GroupedExperts(num_experts, 8, 16, backend=backend)
    counts = torch.zeros(num_experts, dtype=torch.int32)
    weights = torch.zeros(0, 2, requires_grad=True)
    for x, form in (
        (torch.zeros(num_experts, 0, 8), {"num_tokens_per_expert": counts}),
        (torch.zeros(0, 8), {"topk_idx": torch.zeros(0, 2).int(), "topk_weights": weights}),
        (torch.zeros(3, 8), {"topk_idx": torch.zeros(3, 0).int()}),
    ):
        experts.zero_grad()
        leaf = x.clone().requires_grad_()
        y = experts(leaf, **form)
        assert torch.equal(y, x)
        y.sum().backward()
        assert torch.equal(leaf.grad, x)
        assert all(torch.equal(one.grad, torch.zeros_like(one)) for one in experts.parameters())
    assert weights.grad.shape == (0, 2)


def test_sums_are_made_in_ascending_k_and_alike_on_every_device():
    """The way of CPUs and that of other devices, which needs no value on the host."""
    rows = flat_rows.flat_rows(ids_of("mixed"), EXPERTS)
    for dtype in (torch.float16, torch.float32, torch.float64):
        x = torch.randn(rows.num_rows, 50).to(dtype)
        found = flat_rows.sum_rows(x, rows.gathered)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for s, routes in enumerate(rows.gathered.routes.tolist()):
            total = torch.zeros(50, dtype=wide)
            for route in routes:
                total += x[route].to(wide) if route >= 0 else 0
            assert torch.equal(found[s], total.to(dtype))


def test_on_other_devices_the_same(monkeypatch):
    x = torch.randn(TOKENS, 6)
    rows = flat_rows.flat_rows(ids_of("mixed"), EXPERTS)
    num_real = int(rows.offsets[-1])
    copies = flat_rows.expand_rows(x, rows.gathered)
    sums = flat_rows.sum_rows(copies, rows.gathered)
    monkeypatch.setattr(flat_rows, "_is_on_host", lambda tensor: False)
    elsewhere = flat_rows.expand_rows(x, rows.gathered)
    assert torch.equal(elsewhere[:num_real], copies[:num_real])
    assert torch.equal(flat_rows.sum_rows(elsewhere, rows.gathered), sums)


def test_row_by_row():
    experts = GroupedExperts(EXPERTS, HIDDEN, 16, std=0.3, row_by_row=True)
    ids, weights, x = ids_of("mixed"), torch.rand(TOKENS, TOPK), torch.randn(TOKENS, HIDDEN)
    with torch.no_grad():
        y = experts(x, topk_idx=ids, topk_weights=weights)
        for n in range(TOKENS):
            assert torch.equal(experts(x[n : n + 1], topk_idx=ids[n : n + 1], topk_weights=weights[n : n + 1])[0], y[n])
        slab = torch.randn(EXPERTS, 3, HIDDEN)
        full = torch.full((EXPERTS,), 3)
        ends = full.cumsum(0)
        got = experts(slab, num_tokens_per_expert=full)
        assert torch.equal(got.flatten(0, 1), experts(slab.flatten(0, 1), ends))


def test_compiled_as_one_graph():
    experts = make_experts("loops", torch.float32)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    slab, counts = torch.randn(EXPERTS, CAPACITY, HIDDEN), torch.tensor(COUNTS["mixed"])
    x, ids = torch.randn(TOKENS, HIDDEN), ids_of("mixed")
    gradients = []
    for run in (experts, compiled):
        experts.zero_grad()
        weights = torch.rand(TOKENS, TOPK, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = run(x, topk_idx=ids, topk_weights=weights)
        (y.square().sum() + run(slab, num_tokens_per_expert=counts).square().sum()).backward()
        gradients.append([y, weights.grad, experts.gate_up_proj.grad, experts.down_proj.grad])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_the_op_is_well_formed_in_every_form():
    experts = GroupedExperts(2, 4, 3, std=0.3)
    projections = (experts.gate_up_proj, experts.down_proj)
    x = torch.randn(4, 4, requires_grad=True)
    slab = (x, torch.tensor([2, 1]), *projections, "auto", "auto", True)
    torch.library.opcheck(torch.ops.moecomm.grouped_swiglu.default, slab)
    rows = flat_rows.flat_rows(torch.tensor([[0, 1], [1, -1], [-1, -1], [0, 0]]), 2)
    weights = torch.rand(8, requires_grad=True)
    flat = (x, rows.offsets, *projections, "auto", "auto", False, weights, *reversed(rows.gathered))
    torch.library.opcheck(torch.ops.moecomm.grouped_swiglu.default, flat)


def test_fp64_gradcheck_of_flat_rows():
    torch.manual_seed(0)
    experts = GroupedExperts(EXPERTS, 4, 5, std=0.5, dtype=torch.float64)
    ids = ids_of("mixed")
    x = torch.randn(TOKENS, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(TOKENS, TOPK, dtype=torch.float64, requires_grad=True)

    def apply(x, weights, gate_up_proj, down_proj):
        return grouped_swiglu(x, None, gate_up_proj, down_proj=down_proj, topk_idx=ids, topk_weights=weights)

    assert torch.autograd.gradcheck(apply, (x, weights, experts.gate_up_proj, experts.down_proj))


@pytest.mark.parametrize(
    ("x", "form", "words"),
    [
        (torch.zeros(2, 8), {}, "exactly one of offsets, num_tokens_per_expert, topk_idx must be given, got none"),
        (torch.zeros(2, 8), {"offsets": torch.zeros(2).int(), "topk_idx": torch.zeros(2, 1).int()}, "offsets and topk"),
        (torch.zeros(2, 8), {"num_tokens_per_expert": torch.zeros(2).int()}, r"x must be \[E_local = 2, capacity"),
        (torch.zeros(3, 4, 8), {"num_tokens_per_expert": torch.zeros(2).int()}, r"a slab per expert, 2, got \[3, 4"),
        (torch.zeros(2, 4, 8), {"num_tokens_per_expert": torch.zeros(3).int()}, r"int32 or int64 \[2\], got .*\[3\]"),
        (torch.zeros(2, 4, 8), {"num_tokens_per_expert": torch.tensor([1, 5])}, r"0 to capacity = 4, got \[1, 5\]"),
        (torch.zeros(2, 8), {"topk_idx": torch.zeros(3, 1).int()}, r"topk_idx must be int32 or int64 \[2, K\]"),
        (torch.zeros(2, 8), {"topk_idx": torch.zeros(2, 1)}, "topk_idx must be int32 or int64.*got torch.float32"),
        (torch.zeros(2, 8), {"topk_idx": torch.tensor([[0], [2]])}, "topk_idx holds 0 to 2; local ids are 0 to 1"),
        (torch.zeros(2, 8), {"topk_idx": torch.tensor([[0], [-2]])}, "topk_idx holds -2 to 0"),
        (
            torch.zeros(2, 8),
            {"topk_idx": torch.zeros(2, 1).int(), "topk_weights": torch.zeros(2, 2)},
            r"topk_weights must be float32 or float64 \[2, 1\], got torch.float32 \[2, 2\]",
        ),
        (torch.zeros(2, 8), {"offsets": torch.zeros(2).int(), "topk_weights": torch.zeros(2, 1)}, "belong to topk_idx"),
    ],
)
def test_what_does_not_fit_is_refused(x, form, words):
    with pytest.raises(ValueError, match=words):
        GroupedExperts(2, 8, 4)(x, **form)


def forms(group):
    """The same step through all layouts: outputs and the gradients of rows and router weights."""
    tokens = (5, 3)[group.rank]
    generator = torch.Generator().manual_seed(group.rank)
    x, grad = torch.randn(2, tokens, HIDDEN, generator=generator)
    ids, weights = masked(tokens, 6, TOPK, seed=group.rank), torch.rand(tokens, TOPK, generator=generator)
    found = {}
    with Communicator(group, num_experts=6, hidden=HIDDEN, num_topk=TOPK, max_tokens_per_rank=8) as comm:
        experts = GroupedExperts.for_communicator(comm, 16, std=0.3)
        for layout, mode in (("expert_major", "throughput"), ("flat", "throughput"), ("slab", "low_latency")):
            experts.zero_grad()
            leaf, weight = x.clone().requires_grad_(), weights.clone().masked_fill(ids < 0, 0).requires_grad_()
            sent = weight if layout == "flat" else None
            received = comm.dispatch(leaf, ids, sent, mode=mode, layout=layout)
            if layout == "flat":
                y = experts(received.x, topk_idx=received.topk_idx, topk_weights=received.topk_weights)
                out = comm.combine(y, received.handle)
            else:
                counts, offsets = received.num_tokens_per_expert, received.offsets
                form = {"offsets": offsets} if layout == "expert_major" else {"num_tokens_per_expert": counts}
                y = experts(received.x, **form, out=comm.combine_buffer(received.handle, x.dtype))
                out = comm.combine(y, received.handle, topk_weights=weight)
            out.backward(grad)
            kept = (out, leaf.grad, weight.grad, experts.gate_up_proj.grad, experts.down_proj.grad)
            found[layout] = [tensor.detach().clone() for tensor in kept]
    return found


def test_through_an_exchange_all_layouts_give_the_same():
    for found in launch(forms, 2, timeout=60):
        for layout in ("flat", "slab"):
            for have, want in zip(found[layout], found["expert_major"], strict=True):
                torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-6)
