"""Grouped experts against the same experts written one by one, in every dtype, size and shape of load."""

import pytest
import torch
import torch.nn.functional as F

from moecomm.nn import GroupedExperts, grouped_swiglu
from moecomm.nn.arithmetic import compute_dtype, has_native_matmul

LOADS = [[3, 0, 1, 9], [0, 0, 0, 0], [100, 1, 0, 17], [2, 2, 2, 2], [0, 0, 0, 5]]
SIZES = [(7, 5), (65, 33), (64, 700), (1, 1)]
PRECISIONS = [
    (torch.float64, "auto", 1e-12),
    (torch.float32, "auto", 1e-5),
    (torch.bfloat16, "native", 2e-2),
    (torch.bfloat16, "float32", 1e-2),
    (torch.bfloat16, "auto", 2e-2),
    (torch.float16, "float32", 2e-3),
]


def reference(x, ends, gate_up_proj, down_proj):
    outputs, begin = [], 0
    for expert, end in enumerate(ends):
        gate, up = (x[begin:end] @ gate_up_proj[expert].t()).chunk(2, dim=1)
        outputs.append((F.silu(gate) * up) @ down_proj[expert].t())
        begin = end
    return torch.cat([*outputs, torch.zeros_like(x[begin:])])


def offsets_of(load):
    return torch.tensor(load).cumsum(0).to(torch.int32)


def error(have, want):
    difference = (have.detach().double() - want.detach()).norm()
    return (difference / want.norm()).item() if want.norm() > 0 else difference.item()


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
@pytest.mark.parametrize(("dtype", "arithmetic", "tolerance"), PRECISIONS)
def test_outputs_and_all_gradients(dtype, arithmetic, tolerance, hidden, intermediate, load, with_out):
    torch.manual_seed(0)
    experts = GroupedExperts(4, hidden, intermediate, std=0.3, arithmetic=arithmetic, dtype=dtype)
    offsets = offsets_of(load)
    x = torch.randn(sum(load) + 2, hidden).to(dtype).requires_grad_()
    out = torch.full(x.shape, float("nan"), dtype=dtype) if with_out else None
    y = experts(x, offsets, out=out)
    if out is not None:
        assert y.data_ptr() == out.data_ptr()
        assert not out.requires_grad
    grad = torch.randn(1, hidden).to(dtype).expand(x.shape)
    y.backward(grad)
    doubles = [t.detach().double().requires_grad_() for t in (x, experts.gate_up_proj, experts.down_proj)]
    expected = reference(doubles[0], offsets.tolist(), *doubles[1:])
    expected.backward(grad.double())
    assert (y[-2:].isnan() if with_out else y[-2:] == 0).all()  # rows of nobody; in `out` they stay what they were
    assert (x.grad[-2:] == 0).all()
    assert error(y[:-2], expected[:-2]) < tolerance
    for have, want in zip((x, experts.gate_up_proj, experts.down_proj), doubles, strict=True):
        assert have.grad.dtype == have.dtype
        assert error(have.grad, want.grad) < tolerance
    for expert, count in enumerate(load):
        if count == 0:
            assert (experts.gate_up_proj.grad[expert] == 0).all()
            assert (experts.down_proj.grad[expert] == 0).all()


def test_rows_with_gaps_between_them():
    experts = GroupedExperts(2, 6, 5, std=0.3)
    wide = torch.randn(5, 8)
    wide[:, 6:] = float("nan")
    offsets = torch.tensor([2, 99, 5, 99], dtype=torch.int32)[::2]
    plain = experts(wide[:, :6].contiguous(), offsets.contiguous())
    assert torch.equal(experts(wide[:, :6], offsets), plain)
    assert torch.equal(experts(wide[:, :6], offsets, out=torch.empty(5, 6)), plain)


def test_no_rows_keep_the_graph():
    experts = GroupedExperts(3, 8, 4)
    x = torch.zeros(0, 8)
    y = experts(x, offsets_of([0, 0, 0]))
    assert y.shape == (0, 8)
    y.sum().backward()
    for parameter in experts.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def test_no_experts():
    experts = GroupedExperts(0, 8, 4)
    assert (experts(torch.ones(2, 8), torch.zeros(0, dtype=torch.int32)) == 0).all()
    assert experts.state_dict() == {}


def test_fp64_gradcheck():
    torch.manual_seed(0)
    experts = GroupedExperts(3, 4, 5, std=0.5, dtype=torch.float64)
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([2, 2, 5])

    def apply(x, gate_up_proj, down_proj):
        return grouped_swiglu(x, offsets, gate_up_proj, down_proj=down_proj)

    assert torch.autograd.gradcheck(apply, (x, experts.gate_up_proj, experts.down_proj))


@pytest.mark.parametrize("frozen", ["x", "gate_up_proj", "down_proj"])
def test_frozen_parts_get_no_gradient_and_the_others_keep_theirs(frozen):
    experts = GroupedExperts(2, 6, 5, std=0.3)
    x = torch.randn(5, 6, requires_grad=True)
    tensors = {"x": x, "gate_up_proj": experts.gate_up_proj, "down_proj": experts.down_proj}
    offsets = offsets_of([2, 3])
    experts(x, offsets).square().sum().backward()
    full = {name: tensor.grad for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.grad = None
    tensors[frozen].requires_grad_(False)
    experts(x, offsets).square().sum().backward()
    for name, tensor in tensors.items():
        if name == frozen:
            assert tensor.grad is None
        else:
            assert torch.equal(tensor.grad, full[name])


def test_micro_batches_accumulate():
    torch.manual_seed(0)
    experts = GroupedExperts(2, 6, 5, std=0.3, dtype=torch.float64)
    parts = [torch.randn(4, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)]
    for part, load in zip(parts, ([4, 0], [1, 2]), strict=True):
        experts(part, offsets_of(load)).square().sum().backward()
    summed = experts.gate_up_proj.grad.clone()
    experts.zero_grad()
    whole = torch.cat([parts[0], parts[1][:1], parts[1][1:]])
    experts(whole, offsets_of([5, 2])).square().sum().backward()
    torch.testing.assert_close(summed, experts.gate_up_proj.grad)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_everything_is_in_its_dtype(x_dtype, weight_dtype):
    experts = GroupedExperts(2, 16, 8, std=0.3, dtype=weight_dtype)
    x = torch.randn(6, 16).to(x_dtype).requires_grad_()
    offsets = offsets_of([2, 4])
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, offsets)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert x.grad.dtype == x_dtype
    assert experts.gate_up_proj.grad.dtype == weight_dtype
    expected = reference(x.detach().float(), offsets.tolist(), experts.gate_up_proj.float(), experts.down_proj.float())
    assert error(y, expected.double()) < 2e-2


def test_bf16_rows_with_fp32_weights():
    experts = GroupedExperts(2, 16, 8, std=0.3)
    x = torch.randn(6, 16).to(torch.bfloat16).requires_grad_()
    offsets = offsets_of([2, 4])
    y = experts(x, offsets)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    expected = reference(x.detach().float(), offsets.tolist(), experts.gate_up_proj, experts.down_proj)
    assert error(y, expected.double()) < 5e-3
    assert experts.down_proj.grad.dtype == torch.float32


def test_the_cpu_decides_the_arithmetic():
    bf16, fp32 = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    assert compute_dtype(bf16, bf16, "float32") == torch.float32
    assert compute_dtype(bf16, bf16, "native") == torch.bfloat16
    auto = torch.bfloat16 if has_native_matmul(torch.bfloat16) else torch.float32
    assert compute_dtype(bf16, bf16, "auto") == auto
    assert compute_dtype(bf16, fp32, "native") == torch.float32
    assert compute_dtype(fp32.double(), bf16, "auto") == torch.float64


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_same_model_on_any_number_of_ranks(ranks):
    whole = GroupedExperts(8, 6, 4, seed=3)
    size = 8 // ranks
    parts = [
        GroupedExperts(size, 6, 4, seed=3, expert_ids=range(rank * size, (rank + 1) * size)) for rank in range(ranks)
    ]
    assert torch.equal(torch.cat([part.gate_up_proj for part in parts]), whole.gate_up_proj)
    assert torch.equal(torch.cat([part.down_proj for part in parts]), whole.down_proj)
    assert len({tuple(row) for row in whole.gate_up_proj[:, 0].tolist()}) == 8
    assert not torch.equal(GroupedExperts(8, 6, 4, seed=4).down_proj, whole.down_proj)


@pytest.mark.parametrize(("saved_at", "loaded_at"), [(2, 1), (2, 4), (1, 2), (4, 1)])
def test_state_of_any_number_of_ranks_loads_at_any_other(saved_at, loaded_at):
    def model(ranks, rank, seed):
        size = 8 // ranks
        ids = range(rank * size, (rank + 1) * size)
        return torch.nn.ModuleDict({"experts": GroupedExperts(size, 6, 4, seed=seed, expert_ids=ids)})

    dicts = [model(saved_at, rank, seed=1).state_dict() for rank in range(saved_at)]
    merged = {key: value for part in dicts for key, value in part.items()}
    assert len(merged) == sum(len(part) for part in dicts) == 8 * 2, "no two ranks may use one name"
    assert merged["experts.7.gate_up_proj"].shape == (8, 6)
    whole = GroupedExperts(8, 6, 4, seed=1)
    for rank in range(loaded_at):
        loaded = model(loaded_at, rank, seed=2)
        loaded.load_state_dict(merged)
        ids = list(loaded["experts"].expert_ids)
        assert torch.equal(loaded["experts"].gate_up_proj, whole.gate_up_proj[ids])
        assert torch.equal(loaded["experts"].down_proj, whole.down_proj[ids])


def test_loading_misses_nothing_silently():
    experts = GroupedExperts(2, 6, 4, expert_ids=[2, 3])
    state = experts.state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*3\.down_proj"):
        experts.load_state_dict({key: value for key, value in state.items() if key != "3.down_proj"})
    with pytest.raises(RuntimeError, match="Unexpected key.*gate_up_proj"):
        experts.load_state_dict({**state, "gate_up_proj": torch.zeros(2, 8, 6)})
    with pytest.raises(RuntimeError, match=r"2\.down_proj must be \[6, 4\], got \[6, 5\]"):
        experts.load_state_dict({**state, "2.down_proj": torch.zeros(6, 5)})
    experts.load_state_dict({**state, "0.down_proj": torch.zeros(6, 4)})


def test_the_op_is_well_formed():
    experts = GroupedExperts(2, 4, 3, std=0.3)
    x = torch.randn(5, 4, requires_grad=True)
    arguments = (x, offsets_of([2, 3]), experts.gate_up_proj, experts.down_proj, "auto")
    torch.library.opcheck(torch.ops.moecomm.grouped_swiglu.default, arguments)


def test_compiled_as_one_graph_for_every_number_of_rows():
    experts = GroupedExperts(3, 8, 5, std=0.3)
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="aot_eager")
    for load in ([2, 2, 2], [3, 0, 1], [0, 0, 0], [50, 1, 1]):
        x = torch.randn(sum(load), 8)
        gradients = []
        for run in (experts, compiled):
            experts.zero_grad()
            y = run(x, offsets_of(load))
            y.square().sum().backward()
            gradients.append((y.detach(), experts.gate_up_proj.grad))
        assert torch.equal(gradients[0][0], gradients[1][0])
        assert torch.equal(gradients[0][1], gradients[1][1])


def test_wrong_arguments_are_named():
    experts = GroupedExperts(2, 4, 3)
    x = torch.zeros(5, 4)
    with pytest.raises(ValueError, match=r"hidden = 4\], got \[5, 3\]"):
        experts(torch.zeros(5, 3), offsets_of([2, 3]))
    with pytest.raises(ValueError, match=r"\[2\], got torch.int32 \[3\]"):
        experts(x, offsets_of([2, 3, 0]))
    with pytest.raises(ValueError, match=r"offsets\[-1\] = 6 exceeds the 5 rows"):
        experts(x, offsets_of([2, 4]))
    with pytest.raises(ValueError, match=r"not decrease, got \[3, 2\]"):
        experts(x, torch.tensor([3, 2]))
    with pytest.raises(ValueError, match=r"out must be contiguous torch.float32 \[5, 4\], got torch.float64"):
        experts(x, offsets_of([2, 3]), out=torch.zeros(5, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="got 'fp8'"):
        GroupedExperts(2, 4, 3, arithmetic="fp8")
    with pytest.raises(ValueError, match=r"2 distinct ids of 0 or more, got \[1, 1\]"):
        GroupedExperts(2, 4, 3, expert_ids=[1, 1])
