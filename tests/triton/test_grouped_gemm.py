"""The grouped GEMM, interpreted, against a loop over experts: every layout, padding and option."""

import pytest
import torch
from experts_oracle import LOADS, error, expert_major, poisoned, slab

from moecomm.kernels.triton.grouped_gemm import grouped_gemm, grouped_gemm_weight_gradient
from moecomm.kernels.triton.segments import Segments

SIZES = [(40, 35), (32, 64), (1, 1)]
PRECISIONS = [(torch.float32, 1e-5), (torch.float16, 2e-3)]


def cases_of(load):
    counts, tail = LOADS[load]
    yield expert_major(counts, tail)
    yield expert_major(counts, tail, with_counts=False, dtype=torch.int64)
    yield slab(counts)


def spoil_padding(x, case):
    """Padding that is not zero must change nothing."""
    x[~case.is_real] = float("nan")
    return x


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("num_inner", "num_columns"), SIZES)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_products_and_zeros_elsewhere(dtype, tolerance, num_inner, num_columns, load):
    torch.manual_seed(0)
    for case in cases_of(load):
        num_experts = len(case.rows)
        x = spoil_padding(torch.randn(case.num_rows, num_inner).to(dtype), case)
        weight = torch.randn(num_experts, num_columns, num_inner).to(dtype)
        for form in (weight.transpose(1, 2), weight.transpose(1, 2).contiguous()):
            out = grouped_gemm(x, form, case.segments, out=poisoned(case.num_rows, num_columns, dtype=dtype))
            want = torch.zeros(case.num_rows, num_columns, dtype=torch.float64)
            for expert, rows in enumerate(case.rows):
                want[rows] = x[rows].double() @ weight[expert].double().t()
            assert (out[~case.is_real] == 0).all()
            assert error(out, want) < tolerance


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("num_left", "num_right"), SIZES)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_weight_gradients(dtype, tolerance, num_left, num_right, load):
    torch.manual_seed(0)
    for case in cases_of(load):
        left = spoil_padding(torch.randn(case.num_rows, num_left).to(dtype), case)
        right = spoil_padding(torch.randn(case.num_rows, num_right).to(dtype), case)
        out = poisoned(len(case.rows), num_left, num_right, dtype=dtype)
        grouped_gemm_weight_gradient(left, right, case.segments, out=out)
        for expert, rows in enumerate(case.rows):
            assert error(out[expert], left[rows].double().t() @ right[rows].double()) < tolerance
            assert len(rows) or (out[expert] == 0).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_are_gathered_and_weighted(dtype):
    torch.manual_seed(0)
    case = expert_major([5, 0, 40], 3)
    source = torch.randn(11, 24)
    row_idx = torch.randint(-1, 11, (case.num_rows,)).to(dtype)
    row_idx[0], row_idx[1] = -1, 11  # both name no row
    # What stands in padding is never looked at.
    row_idx[~case.is_real] = 1 << 30
    row_weights = torch.randn(case.num_rows)
    row_weights[~case.is_real] = float("nan")
    weight = torch.randn(3, 24, 20)
    out = grouped_gemm(
        source, weight, case.segments, row_idx=row_idx, row_weights=row_weights, out=poisoned(case.num_rows, 20)
    )
    taken = torch.zeros(case.num_rows, 24)
    is_taken = (row_idx >= 0) & (row_idx < 11)
    taken[is_taken] = source[row_idx[is_taken].long()]
    want = torch.zeros(case.num_rows, 20)
    left = torch.randn(case.num_rows, 9)
    gradient = grouped_gemm_weight_gradient(left, source, case.segments, row_idx=row_idx, out=poisoned(3, 9, 24))
    for expert, rows in enumerate(case.rows):
        want[rows] = taken[rows] @ weight[expert] * row_weights[rows, None]
        assert error(gradient[expert], left[rows].t() @ taken[rows]) < 1e-5
    assert error(out, want) < 1e-5
    assert (out[~case.is_real] == 0).all()


def test_dtypes_may_differ():
    case = expert_major([5, 9], 0, with_counts=False)
    x, weight = torch.randn(14, 16).half(), torch.randn(2, 16, 8)
    out = grouped_gemm(x, weight, case.segments)
    assert out.dtype == torch.float16
    want = torch.cat([x[:5].double() @ weight[0].double(), x[5:].double() @ weight[1].double()])
    assert error(out, want) < 1e-3


def test_wrong_offsets_reach_no_memory_beyond_the_rows():
    x, weight = torch.ones(6, 4), torch.ones(3, 4, 4)
    room = poisoned(18, 4)
    for offsets in ([-5, 3, 1000], [4, 2, 6], [1 << 40, 0, 0]):
        segments = Segments.expert_major(6, torch.tensor(offsets), torch.tensor([9, -1, 1 << 40]))
        grouped_gemm(x, weight, segments, out=room[6:12])
        assert room[:6].isnan().all()
        assert room[12:].isnan().all()
        assert (grouped_gemm_weight_gradient(x, x, segments, out=poisoned(3, 4, 4)) <= 6).all()


def test_rows_with_gaps_between_them():
    torch.manual_seed(0)
    segments = expert_major([3, 4], 0, with_counts=False).segments
    wide, weight = torch.randn(7, 20), torch.randn(2, 9, 16)
    out = poisoned(7, 16)
    grouped_gemm(wide[:, 3:12], weight, segments, out=out[:, :])
    assert torch.equal(grouped_gemm(wide[:, 3:12].contiguous(), weight, segments), out)
    room = poisoned(7, 20)
    assert torch.equal(grouped_gemm(wide[:, 3:12], weight, segments, out=room[:, 2:18]), out)
    assert room[:, :2].isnan().all()
    assert room[:, 18:].isnan().all()


def test_wrong_arguments_are_named():
    segments = expert_major([3, 4], 0, with_counts=False).segments
    x, weight = torch.zeros(7, 4), torch.zeros(2, 4, 5)
    with pytest.raises(ValueError, match=r"weight must be \[2, 3, 5\], got \[2, 4, 5\]"):
        grouped_gemm(x[:, :3], weight, segments)
    with pytest.raises(ValueError, match=r"x must be \[7, 4\], got \[6, 4\]"):
        grouped_gemm(x[:6], weight, segments)
    with pytest.raises(ValueError, match=r"bfloat16, float16 or float32, got \[torch.float64"):
        grouped_gemm(x.double(), weight, segments)
    with pytest.raises(ValueError, match=r"row_idx must be contiguous int32 or int64 \[7\], got torch.float32"):
        grouped_gemm(x, weight, segments, row_idx=torch.zeros(7))
    with pytest.raises(ValueError, match=r"row_weights must be \[7\], got \[6\]"):
        grouped_gemm(x, weight, segments, row_weights=torch.zeros(6))
    with pytest.raises(ValueError, match="out must have contiguous columns"):
        grouped_gemm(x, weight, segments, out=torch.zeros(5, 7).t())
    with pytest.raises(ValueError, match=r"num_tokens_per_expert must be int32 or int64 \[2\]"):
        Segments.expert_major(7, torch.tensor([3, 7]), torch.tensor([3]))
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        Segments.slab(0, torch.tensor([3]))
