"""The grouped GEMM with operands loaded by tensor descriptors, interpreted; and which tensors can be described."""

import contextlib
import dataclasses

import pytest
import torch
import triton
from experts_oracle import LOADS, error, expert_major, poisoned, slab, swiglu

from moecomm.kernels.triton import descriptors, grouped_gemm, tile_shapes
from moecomm.kernels.triton.descriptors import describable, describable_rows
from moecomm.kernels.triton.grouped_swiglu import grouped_swiglu


@pytest.fixture
def described(monkeypatch):
    """Turns descriptors on; a list of the shapes of weights for which they were used."""
    weights = []

    def spy(x, weight, shape):
        weights.append(tuple(weight.shape))
        return descriptors.descriptors_of(x, weight, shape)

    def spy_on_rows(left, right, shape):
        weights.append((left.shape[1], right.shape[1]))
        return descriptors.descriptors_of_rows(left, right, shape)

    monkeypatch.setattr(grouped_gemm, "descriptors_of", spy)
    monkeypatch.setattr(grouped_gemm, "descriptors_of_rows", spy_on_rows)
    shape = dataclasses.replace(tile_shapes._INTERPRETED, uses_descriptors=True)
    monkeypatch.setattr(tile_shapes, "_INTERPRETED", shape)
    return weights


@pytest.mark.parametrize("load", [load for load in LOADS if load not in ("no rows", "no expert")])
def test_products_and_zeros_elsewhere(described, load):
    torch.manual_seed(0)
    counts, tail = LOADS[load]
    for case in (expert_major(counts, tail), slab(counts)):
        x = torch.randn(case.num_rows, 64).half()
        x[~case.is_real] = float("nan")
        weight = torch.randn(len(counts), 40, 64).half()
        described.clear()
        for form in (weight.transpose(1, 2), weight.transpose(1, 2).contiguous()):
            out = poisoned(case.num_rows, 40, dtype=torch.float16)
            grouped_gemm.grouped_gemm(x, form, case.segments, out=out)
            want = torch.zeros(case.num_rows, 40, dtype=torch.float64)
            for expert, rows in enumerate(case.rows):
                want[rows] = x[rows].double() @ weight[expert].double().t()
            assert (out[~case.is_real] == 0).all()
            assert error(out, want) < 2e-3
        assert len(described) == 2


def test_an_inner_dim_that_no_block_divides_ends_with_zeros(described):
    torch.manual_seed(0)
    case = expert_major([5, 40], 0, with_counts=False)
    x, weight = torch.randn(45, 72).half(), torch.randn(2, 16, 72).half()
    out = grouped_gemm.grouped_gemm(x, weight.transpose(1, 2), case.segments)
    want = torch.cat([x[:5].double() @ weight[0].double().t(), x[5:].double() @ weight[1].double().t()])
    assert error(out, want) < 2e-3
    assert len(described) == 1


def test_experts(described):
    torch.manual_seed(0)
    case = expert_major([5, 0, 67, 32], 7)
    tensors = [torch.randn(case.num_rows, 64), 0.2 * torch.randn(4, 128, 64), 0.2 * torch.randn(4, 64, 64)]
    tensors = [tensor.half().requires_grad_() for tensor in tensors]
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    row_weights = torch.rand(case.num_rows)
    y = grouped_swiglu(*tensors, segments=case.segments, row_weights=row_weights)
    want = swiglu(*doubles, case, row_weights=row_weights.double())
    assert error(y, want) < 4e-3
    y.float().square().sum().backward()
    want.square().sum().backward()
    for have, double in zip(tensors, doubles, strict=True):
        assert error(have.grad, double.grad) < 8e-3
    assert len(described) == 6, "two products forward, four backward"


@pytest.mark.parametrize("load", [load for load in LOADS if load not in ("no rows", "no expert")])
def test_weight_gradients(described, load):
    torch.manual_seed(0)
    counts, tail = LOADS[load]
    for case in (expert_major(counts, tail), slab(counts)):
        left, right = torch.randn(case.num_rows, 40).half(), torch.randn(case.num_rows, 72).half()
        left[~case.is_real], right[~case.is_real] = float("nan"), float("nan")
        out = poisoned(len(counts), 40, 72)
        described.clear()
        grouped_gemm.grouped_gemm_weight_gradient(left, right, case.segments, out=out)
        for expert, rows in enumerate(case.rows):
            assert error(out[expert], left[rows].double().t() @ right[rows].double()) < 1e-5
        assert described == [(40, 72)]


def test_gathered_rows_are_loaded_by_pointers(described):
    case = expert_major([5, 4], 0, with_counts=False)
    x, weight = torch.randn(9, 64).half(), torch.randn(2, 64, 16).half()
    gathered = grouped_gemm.grouped_gemm(x, weight, case.segments, row_idx=torch.arange(9))
    assert described == []
    assert error(grouped_gemm.grouped_gemm(x, weight, case.segments), gathered) < 2e-3
    assert len(described) == 1


def test_what_can_be_described():
    x, weight = torch.zeros(9, 64).half(), torch.zeros(3, 40, 64).half()
    assert describable(x, weight.transpose(1, 2)) == "inner"
    assert describable(x, weight.transpose(1, 2).contiguous()) == "columns"
    assert describable(x.float(), weight.transpose(1, 2).float()) == "none"
    assert describable(x.bfloat16(), weight.transpose(1, 2)) == "none"
    assert describable(x[:0], weight.transpose(1, 2)) == "none"
    # Not aligned: where it begins, from row to row, from expert to expert.
    room = torch.zeros(9, 72).half()
    assert describable(room[:, :64], weight.transpose(1, 2)) == "inner"
    assert describable(room[:, 1:65], weight.transpose(1, 2)) == "none"
    assert describable(torch.zeros(9, 70).half()[:, :64], weight.transpose(1, 2)) == "none"
    assert describable(x, torch.zeros(3, 41, 64).half()[:, :40].transpose(1, 2)) == "none"
    assert describable(x, torch.zeros(3, 64, 36).half()) == "none"
    assert describable(x, torch.zeros(3, 72, 40).half()[:, :64]) == "none"
    assert describable_rows(x, room[:, :64])
    assert not describable_rows(x, room[:, 1:65])
    assert not describable_rows(x, torch.zeros(9, 70).half()[:, :64])
    assert not describable_rows(x, room.float())
    assert not describable_rows(x[:0], x[:0])
    one_for_all = x[:1].expand(9, 64)
    assert describable(one_for_all, weight.transpose(1, 2)) == "none"
    assert not describable_rows(x, one_for_all)
    # A block would reach into the next expert.
    assert describable(x[:, :40], torch.zeros(3, 40, 64).half()) == "none"


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("kind", ["plain", "swiglu", "swiglu_backward", "weights"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_candidate_fits_its_device(capability, kind, itemsize):
    for rows_per_expert in (1, 16, 32, 64, 128, 4096):
        shapes = tile_shapes.candidate_shapes(kind, itemsize, rows_per_expert, capability, allows_descriptors=True)
        assert len(set(shapes)) == len(shapes) >= 3
        assert not shapes[0].uses_descriptors, "what is taken unmeasured works everywhere"
        assert any(shape.uses_descriptors for shape in shapes) == (
            capability >= 90 and itemsize == 2 and rows_per_expert > 64
        )
        for shape in shapes:
            assert shape.shared_bytes(kind, itemsize) <= (227 if capability >= 90 else 163) * 1024
            assert shape.rows >= 16
            assert kind == "weights" or shape.rows <= 2 * max(16, rows_per_expert) or itemsize == 4


def test_shapes_are_timed_on_the_device_of_the_tensors(monkeypatch):
    """Which need not be the current one: its streams are those that the timer looks at."""
    entered, timed = [], []

    @contextlib.contextmanager
    def on(device):
        entered.append(device)
        yield
        entered.append(None)

    def do_bench(step, warmup, rep):
        timed.append(entered[-1])
        step()
        return 2.0

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    launched = []
    values = list(dataclasses.astuple(tile_shapes.TileShape(64, 64, 32, 4, 3)))
    assert tile_shapes._time(launched.append, values, torch.device("cuda", 1)) == 2.0
    assert (timed, entered[-1]) == ([torch.device("cuda", 1)], None)
    assert launched == [tile_shapes.TileShape(64, 64, 32, 4, 3)]
