"""Rows and matrices that lie more than 2**31 elements from the first: a sparse file holds them."""

import pytest
import torch
from experts_oracle import error, expert_major, poisoned, slab, swiglu

from moecomm.kernels.triton.grouped_gemm import grouped_gemm, grouped_gemm_weight_gradient
from moecomm.kernels.triton.grouped_swiglu import grouped_swiglu

FAR = (1 << 30) + 48  # elements; three of them are beyond 2**31 and 2**32 bytes
COUNTS = [1, 0, 2, 1]


@pytest.fixture
def far(tmp_path):
    """A function that makes fp16 tensors whose first dim has stride FAR, each in a sparse file of its own."""

    def make(*shape):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.bin"
        with path.open("wb") as file:
            file.truncate(2 * FAR * shape[0])
        whole = torch.from_file(str(path), shared=True, size=FAR * shape[0], dtype=torch.float16)
        inner = torch.empty(shape[1:], device="meta").stride()
        return whole.as_strided(shape, (FAR, *inner))

    return make


def test_rows_results_and_matrices(far):
    torch.manual_seed(0)
    segments = expert_major(COUNTS, 0, with_counts=False).segments
    x, weight, out = far(4, 24), far(4, 24, 20), far(4, 20)
    x.copy_(torch.randn(x.shape))
    weight.copy_(torch.randn(weight.shape))
    grouped_gemm(x, weight, segments, out=out)
    experts = [0, 2, 2, 3]
    want = torch.stack([x[n].float() @ weight[e].float() for n, e in enumerate(experts)])
    assert error(out, want) < 2e-3
    gradient = far(4, 20, 24)
    grouped_gemm_weight_gradient(out, x, segments, out=gradient)
    for expert in range(4):
        rows = [n for n, e in enumerate(experts) if e == expert]
        assert error(gradient[expert], out[rows].float().t() @ x[rows].float()) < 2e-3


def test_gathered_rows(far):
    torch.manual_seed(0)
    case = slab([2, 1], capacity=3)
    source = far(4, 24)
    source.copy_(torch.randn(source.shape))
    row_idx = torch.tensor([3, 2, 0, 3, 0, 0], dtype=torch.int32)
    weight = torch.randn(2, 24, 20).half()
    out = grouped_gemm(source, weight, case.segments, row_idx=row_idx, out=poisoned(6, 20, dtype=torch.float16))
    taken = source[row_idx.long()].float()
    want = torch.zeros(6, 20)
    for expert, rows in enumerate(case.rows):
        want[rows] = taken[rows] @ weight[expert].float()
    assert error(out, want) < 2e-3


def test_experts(far):
    torch.manual_seed(0)
    case = expert_major(COUNTS, 0, with_counts=False)
    tensors = [far(4, 16), far(4, 20, 16), far(4, 16, 10)]
    for tensor in tensors:
        tensor.copy_(0.5 * torch.randn(tensor.shape))
        tensor.requires_grad_()
    y = grouped_swiglu(*tensors, segments=case.segments)
    doubles = [tensor.detach().double().requires_grad_() for tensor in tensors]
    want = swiglu(*doubles, case)
    assert error(y, want) < 4e-3
    y.float().sum().backward()
    want.sum().backward()
    for have, double in zip(tensors, doubles, strict=True):
        assert error(have.grad, double.grad) < 4e-3
