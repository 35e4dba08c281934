"""Experts by the grouped GEMM, interpreted: outputs and all gradients against plain torch in fp64."""

import pytest
import torch
from experts_oracle import LOADS, error, expert_major, slab, swiglu

import moecomm.kernels.triton.grouped_gemm as gemm
from moecomm.kernels.registry import expert_kernels_for
from moecomm.kernels.triton.gathered_rows import sum_gathered_rows
from moecomm.kernels.triton.grouped_swiglu import grouped_swiglu
from moecomm.nn import GroupedExperts

HIDDEN, INTERMEDIATE = 34, 33
PRECISIONS = [(torch.float32, 1e-5), (torch.float16, 4e-3)]


@pytest.fixture(autouse=True)
def _fresh_memory_is_poison(monkeypatch):
    """Whatever is allocated uninitialised holds NaN, so that reading what nobody wrote shows."""
    real = {name: getattr(torch, name) for name in ("empty", "empty_like")}
    real_new = torch.Tensor.new_empty

    def spoil(tensor):
        return tensor.fill_(float("nan")) if tensor.is_floating_point() and not tensor.is_meta else tensor

    for name, make in real.items():
        monkeypatch.setattr(torch, name, lambda *args, make=make, **kwargs: spoil(make(*args, **kwargs)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: spoil(real_new(*args, **kwargs)))


def cases_of(load):
    counts, tail = LOADS[load]
    yield expert_major(counts, tail)
    yield expert_major(counts, tail, with_counts=False)
    yield slab(counts)


@pytest.mark.parametrize("options", ["plain", "gathered", "weighted", "gathered and weighted"])
@pytest.mark.parametrize(
    ("dtype", "tolerance", "load"),
    [
        (torch.float16, 4e-3, "mixed"),
        *((torch.float32, 1e-5, load) for load in ("mixed", "one row", "no rows", "nobody's rows", "no expert")),
    ],
)
def test_outputs_and_all_gradients(dtype, tolerance, load, options):
    torch.manual_seed(0)
    for case in cases_of(load):
        num_experts = len(case.rows)
        row_idx = torch.randint(-1, 9, (case.num_rows,)) if "gathered" in options else None
        x = torch.randn(case.num_rows if row_idx is None else 9, HIDDEN).to(dtype)
        if row_idx is None:
            x[~case.is_real] = float("nan")
        else:
            row_idx[~case.is_real] = 4
        tensors = [
            x,
            (0.3 * torch.randn(num_experts, 2 * INTERMEDIATE, HIDDEN)).to(dtype),
            (0.3 * torch.randn(num_experts, HIDDEN, INTERMEDIATE)).to(dtype),
        ]
        if "weighted" in options:
            tensors.append(torch.rand(case.num_rows))
        doubles = [tensor.double().requires_grad_() for tensor in tensors]
        for tensor in tensors:
            tensor.requires_grad_()
        weights = [None if len(both) < 4 else both[3] for both in (tensors, doubles)]
        y = grouped_swiglu(*tensors[:3], segments=case.segments, row_idx=row_idx, row_weights=weights[0])
        want = swiglu(*doubles[:3], case, row_idx=row_idx, row_weights=weights[1])
        assert (y[~case.is_real] == 0).all()
        assert error(y, want) < tolerance
        grad = torch.randn(case.num_rows, HIDDEN).to(dtype)
        y.backward(grad)
        if want.requires_grad:  # the oracle of no experts depends on nothing
            want.backward(grad.double())
        for have, double in zip(tensors, doubles, strict=True):
            wanted = torch.zeros_like(double) if double.grad is None else double.grad
            wanted = wanted.nan_to_num() if have is x else wanted
            assert have.grad.dtype == have.dtype
            assert error(have.grad, wanted) < tolerance
        for expert, rows in enumerate(case.rows):
            if len(rows) == 0:
                assert (tensors[1].grad[expert] == 0).all()
                assert (tensors[2].grad[expert] == 0).all()
        if row_idx is None:
            assert (x.grad[~case.is_real] == 0).all()


@pytest.mark.parametrize("frozen", [0, 1, 2, 3])
def test_frozen_parts_get_no_gradient_and_the_others_keep_theirs(frozen):
    torch.manual_seed(0)
    case = expert_major([3, 4], 2)
    tensors = [torch.randn(case.num_rows, 8), torch.randn(2, 10, 8), torch.randn(2, 8, 5), torch.rand(case.num_rows)]
    gradients = []
    for wanted in ([0, 1, 2, 3], [place for place in range(4) if place != frozen]):
        leaves = [tensor.clone().requires_grad_(place in wanted) for place, tensor in enumerate(tensors)]
        grouped_swiglu(*leaves[:3], segments=case.segments, row_weights=leaves[3]).square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for place, (full, some) in enumerate(zip(*gradients, strict=True)):
        assert some is None if place == frozen else torch.equal(full, some)


@pytest.mark.parametrize("load", ["mixed", "nobody's rows"])
def test_padding_may_be_left_as_it_is(load):
    torch.manual_seed(0)
    for case in cases_of(load):
        tensors = [torch.randn(case.num_rows, 8), *(torch.randn(len(case.rows), *size) for size in ((10, 8), (8, 5)))]
        tensors[0].requires_grad_()
        cleared = grouped_swiglu(*tensors, segments=case.segments)
        left = grouped_swiglu(*tensors, segments=case.segments, clears_padding=False)
        assert torch.equal(left[case.is_real], cleared[case.is_real])
        assert left[~case.is_real].isnan().all()
        left.nan_to_num().sum().backward()
        assert (tensors[0].grad[~case.is_real] == 0).all()


def test_large_gates_neither_overflow_nor_lose_the_sign():
    case = expert_major([4], 0, with_counts=False)
    x = torch.tensor([[200.0], [-200.0], [3.0], [-3.0]], requires_grad=True)
    gate_up_proj = torch.ones(1, 2, 1)
    y = grouped_swiglu(x, gate_up_proj, torch.ones(1, 1, 1), segments=case.segments)
    double = x.detach().double().requires_grad_()
    want = swiglu(double, gate_up_proj.double(), torch.ones(1, 1, 1).double(), case)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-30)
    y.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(x.grad.double(), double.grad, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gathered_rows_are_summed_in_order(dtype):
    torch.manual_seed(0)
    rows = torch.randn(50, 1300).to(dtype)
    row_idx = torch.randint(-1, 8, (50,))
    row_idx[row_idx == 5] = 6
    out = sum_gathered_rows(rows, row_idx, 7)
    for source in range(7):
        total = torch.zeros(1300)
        for row in rows[row_idx == source]:
            total += row.float()
        assert torch.equal(out[source], total.to(dtype))
    assert sum_gathered_rows(rows, row_idx, 0).shape == (0, 1300)


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("load", [[3, 0, 1, 9], [0, 0, 0, 0], [50, 1, 0, 17]])
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_every_backend_of_the_module_agrees_with_the_loops(backend, dtype, tolerance, load, with_out):
    torch.manual_seed(0)
    offsets = torch.tensor(load).cumsum(0).to(torch.int32)
    x = torch.randn(sum(load) + 2, 32).to(dtype)
    results = []
    for name in ("loops", backend):
        experts = GroupedExperts(4, 32, 24, std=0.3, backend=name, dtype=dtype)
        rows = x.clone().requires_grad_()
        out = torch.full_like(x, 7.0) if with_out else None
        y = experts(rows, offsets, out=out)
        assert experts.chosen_backend == name
        assert (y[-2:] == (7.0 if with_out else 0.0)).all()
        assert out is None or y.data_ptr() == out.data_ptr()
        y.float().square().sum().backward()
        with torch.no_grad():
            again = experts(rows, offsets, out=None if out is None else torch.full_like(x, 7.0))
        assert torch.equal(again, y)
        assert (rows.grad[-2:] == 0).all()
        results.append([y, rows.grad, experts.gate_up_proj.grad, experts.down_proj.grad])
        for expert, count in enumerate(load):
            assert count or (experts.gate_up_proj.grad[expert] == 0).all()
            assert count or (experts.down_proj.grad[expert] == 0).all()
    for want, have in zip(*results, strict=True):
        assert have.dtype == want.dtype
        assert error(have, want) < tolerance


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("num_experts", [0, 2])
def test_no_rows_or_no_experts(backend, num_experts):
    experts = GroupedExperts(num_experts, 8, 16, backend=backend)
    for num_rows in (0, 3):
        experts.zero_grad()
        x = torch.ones(num_rows, 8, requires_grad=True)
        y = experts(x, torch.zeros(num_experts, dtype=torch.int32))
        assert torch.equal(y, torch.zeros(num_rows, 8))
        y.sum().backward()
        assert torch.equal(x.grad, torch.zeros(num_rows, 8))
        for parameter in experts.parameters():
            assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def test_half_precision_rows_with_fp32_weights():
    torch.manual_seed(0)
    offsets = torch.tensor([2, 4], dtype=torch.int32)
    gradients = []
    for backend in ("loops", "triton"):
        experts = GroupedExperts(2, 16, 8, std=0.3, backend=backend)
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(0)).half().requires_grad_()
        y = experts(x, offsets)
        assert y.dtype == torch.float16
        y.float().square().sum().backward()
        gradients.append([y, x.grad, experts.gate_up_proj.grad, experts.down_proj.grad])
    for want, have in zip(*gradients, strict=True):
        assert have.dtype == want.dtype
        assert error(have, want) < 2e-3


def test_row_by_row_is_always_by_loops():
    experts = GroupedExperts(2, 16, 8, backend="triton", row_by_row=True)
    with torch.no_grad():
        experts(torch.ones(3, 16), torch.tensor([2, 3]))
    assert experts.chosen_backend == "loops"


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_compiled_as_one_graph(backend):
    offsets = torch.tensor([3, 3, 8], dtype=torch.int32)
    experts = GroupedExperts(3, 8, 16, std=0.3, backend=backend)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    x = torch.randn(9, 8)
    gradients = []
    for run in (experts, compiled):
        experts.zero_grad()
        run(x, offsets).square().sum().backward()
        gradients.append(experts.gate_up_proj.grad)
    assert torch.equal(*gradients)


def test_what_a_backend_cannot_serve_is_refused_with_the_reason(monkeypatch):
    offsets = torch.tensor([2, 3])
    with pytest.raises(ValueError, match="backend must be one of.*got 'cuda'"):
        GroupedExperts(2, 8, 8, backend="cuda")
    with pytest.raises(ValueError, match="'triton' cannot.*bfloat16, float16 or float32, got .*float64"):
        GroupedExperts(2, 8, 8, backend="triton", dtype=torch.float64)(torch.ones(3, 8).double(), offsets)
    with pytest.raises(ValueError, match="'torch' cannot.*multiple of 16 bytes, got hidden and intermediate"):
        GroupedExperts(2, 7, 8, backend="torch")(torch.ones(3, 7), offsets)
    with pytest.raises(ValueError, match="'torch' cannot.*one dtype"):
        GroupedExperts(2, 8, 8, backend="torch")(torch.ones(3, 8).half(), offsets)
    monkeypatch.setattr("moecomm.kernels.triton.runtime.is_interpreted", lambda: False)
    assert "CUDA" in expert_kernels_for("triton").refusal(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1))
    with pytest.raises(ValueError, match="x is on cpu"):
        gemm.compute_dtype(torch.ones(1))
