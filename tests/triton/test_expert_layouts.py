"""Experts on what slab and flat dispatches give, by interpreted Triton kernels: no copies, no look from the host."""

import pytest
import torch
from expert_layouts import COUNTS, EXPERTS, FLATS, TOKENS, TOPK, check_flat, check_slab, ids_of, make_experts
from torch.utils._python_dispatch import TorchDispatchMode

from moecomm.kernels import flat_rows
from moecomm.kernels.registry import kernels_for
from moecomm.kernels.triton import grouped_swiglu
from moecomm.kernels.triton.gathered_rows import sum_routed_rows
from moecomm.nn import GroupedExperts

PRECISIONS = [(torch.float32, 1e-5), (torch.float16, 6e-3)]


@pytest.fixture(autouse=True)
def _fresh_memory_is_poison(monkeypatch):
    """Whatever is allocated uninitialised holds NaN, so that reading what nobody wrote shows."""
    real_new = torch.Tensor.new_empty

    def spoil(tensor):
        return tensor.fill_(float("nan")) if tensor.is_floating_point() and not tensor.is_meta else tensor

    for name in ("empty", "empty_like"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, make=make, **kwargs: spoil(make(*args, **kwargs)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: spoil(real_new(*args, **kwargs)))


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_slab(dtype, tolerance, kind, with_out):
    check_slab("triton", dtype, tolerance, kind, with_out=with_out)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("kind", FLATS)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_flat(dtype, tolerance, kind, is_weighted):
    check_flat("triton", dtype, tolerance, kind, is_weighted=is_weighted, with_out=kind == "mixed")


def test_odd_width_and_slabs_of_one_row():
    check_slab("triton", torch.float32, 1e-5, "mixed", hidden=7, capacity=1)
    check_flat("triton", torch.float32, 1e-5, "mixed", hidden=7)


@pytest.mark.parametrize("num_experts", [0, 2])
def test_no_rows_keep_the_graph(num_experts):
    experts = GroupedExperts(num_experts, 8, 16, backend="triton")
    counts = torch.zeros(num_experts, dtype=torch.int32)
    for x, form in (
        (torch.zeros(num_experts, 0, 8), {"num_tokens_per_expert": counts}),
        (torch.zeros(0, 8), {"topk_idx": torch.zeros(0, 2).int(), "topk_weights": torch.zeros(0, 2)}),
        (torch.zeros(3, 8), {"topk_idx": torch.full((3, 2), -1)}),
    ):
        experts.zero_grad()
        leaf = x.clone().requires_grad_()
        y = experts(leaf, **form)
        assert torch.equal(y, x)
        y.sum().backward()
        assert torch.equal(leaf.grad, x)
        assert all(torch.equal(one.grad, torch.zeros_like(one)) for one in experts.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_routed_rows_are_summed_to_the_bits_of_the_row_kernels(dtype):
    rows = flat_rows.flat_rows(ids_of("mixed"), EXPERTS)
    x = torch.randn(rows.num_rows, 1100).to(dtype)
    x[int(rows.offsets[-1]) :] = float("nan")
    want = torch.zeros(TOKENS, 1100, dtype=dtype)
    kernels_for("reference").combine_rows(want, rows.gathered.routes, [x.data_ptr()])
    guarded = torch.full((TOKENS + 2, 1100), 7.0, dtype=dtype)
    sum_routed_rows(x, rows.gathered.routes, out=guarded[1:-1])
    assert torch.equal(guarded[1:-1] + 0.0, want + 0.0)
    assert (guarded[0] == 7).all()
    assert (guarded[-1] == 7).all()
    assert torch.equal(sum_routed_rows(x, rows.gathered.routes) + 0.0, want + 0.0)


class NoLooking(TorchDispatchMode):
    """What would make the host wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        assert name not in ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "masked_select"), name
        return func(*args, **(kwargs or {}))


def test_no_value_is_read_on_the_host_and_no_row_of_the_input_is_copied(monkeypatch):
    """The checks of ids belong to the CPU alone; interpreted kernels themselves are no torch operators."""
    copied = []
    expand = grouped_swiglu.expand_rows
    monkeypatch.setattr(grouped_swiglu, "expand_rows", lambda rows, how: copied.append(rows) or expand(rows, how))
    experts = make_experts("triton", torch.float32)
    x = torch.randn(TOKENS, experts.hidden, requires_grad=True)
    weights = torch.rand(TOKENS, TOPK, requires_grad=True)
    slab, counts = torch.randn(EXPERTS, 9, experts.hidden, requires_grad=True), torch.tensor(COUNTS["mixed"])
    ids = ids_of("mixed")
    monkeypatch.setattr(flat_rows, "_is_on_host", lambda tensor: False)
    with NoLooking():
        y = experts(x, topk_idx=ids, topk_weights=weights)
        assert copied == []
        z = experts(slab, num_tokens_per_expert=counts)
        (y.square().sum() + z.nan_to_num().square().sum()).backward()
    assert [tuple(rows.shape) for rows in copied] == [(TOKENS, experts.hidden)], "the gradient, for the weights'"


def test_compiled_as_one_graph():
    experts = make_experts("triton", torch.float32)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    slab, counts = torch.randn(EXPERTS, 9, experts.hidden), torch.tensor(COUNTS["mixed"])
    x, ids = torch.randn(TOKENS, experts.hidden), ids_of("mixed")
    gradients = []
    for run in (experts, compiled):
        experts.zero_grad()
        weights = torch.rand(TOKENS, TOPK, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = run(x, topk_idx=ids, topk_weights=weights)
        (y.square().sum() + run(slab, num_tokens_per_expert=counts).square().sum()).backward()
        gradients.append([y, weights.grad, experts.gate_up_proj.grad, experts.down_proj.grad])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
