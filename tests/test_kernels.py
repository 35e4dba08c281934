"""Row kernels: every implementation and every instruction set against the reference, bit by bit."""

import pytest
import torch
from kernel_cases import (
    FLOAT_DTYPES,
    assert_same_bits,
    expert_ranks,
    fresh_memory,
    ids_of,
    interesting,
    plans,
)

from moecomm import _C
from moecomm.kernels import kernels_for
from moecomm.kernels.base import weights_dtype

REFERENCE = kernels_for("reference")
CPU = kernels_for("cpu")

COLUMNS = [0, 1, 7, 31, 32, 33, 129, 256, 300, 515]


@pytest.fixture(params=["generic", "avx2", "avx512"], autouse=True)
def instruction_set(request):
    if not _C.cpu_features()[request.param]:
        pytest.skip(f"this processor has no {request.param}")
    _C.set_instruction_set(request.param)
    yield request.param
    _C.set_instruction_set("auto")


def random_plan(num_tokens, num_topk, *, layout="expert_major", num_experts=12, num_ranks=3, seed=0):
    ids = ids_of(num_tokens, num_topk, num_experts, seed=seed)
    return ids, plans(ids, expert_ranks(num_experts, num_ranks), num_ranks, layout)


@pytest.mark.parametrize("dtype", [*FLOAT_DTYPES, torch.uint8, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("layout", ["expert_major", "flat"])
def test_push_copies_bytes(dtype, columns, layout):
    _, plan = random_plan(9, 4, layout=layout)
    x = torch.randint(0, 256, (9 * columns * dtype.itemsize,), dtype=torch.uint8).view(dtype).reshape(9, columns)
    got, want = (fresh_memory(plan.num_rows, columns, dtype) for _ in range(2))
    CPU.push_rows(x, plan.routes, got.addresses)
    REFERENCE.push_rows(x, plan.routes, want.addresses)
    assert_same_bits(got.bytes, want.bytes)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_push_scales(dtype, columns):
    ids, plan = random_plan(9, 4)
    x = interesting((9, columns), dtype)
    weights = torch.randn(9, 4, dtype=weights_dtype(dtype)).masked_fill(ids < 0, float("nan"))
    got, want = (fresh_memory(plan.num_rows, columns, dtype) for _ in range(2))
    CPU.push_rows(x, plan.routes, got.addresses, weights=weights)
    REFERENCE.push_rows(x, plan.routes, want.addresses, weights=weights)
    assert_same_bits(got.bytes, want.bytes)


@pytest.mark.parametrize("columns", [2048, 2047, 9000])
@pytest.mark.parametrize("scaled", [False, True])
def test_push_streams_large_calls(columns, scaled):
    num_tokens = 6 * 2**20 // (columns * 2 * 4)
    _, plan = random_plan(num_tokens, 4)
    x = torch.randn(num_tokens, columns).bfloat16()
    weights = torch.randn(num_tokens, 4) if scaled else None
    got, want = (fresh_memory(plan.num_rows, columns, x.dtype) for _ in range(2))
    CPU.push_rows(x, plan.routes, got.addresses, weights=weights)
    REFERENCE.push_rows(x, plan.routes, want.addresses, weights=weights)
    assert_same_bits(got.bytes, want.bytes)


@pytest.mark.parametrize("offset", [1, 8, 63])
def test_push_reads_strided_rows_and_writes_to_any_address(offset):
    _, plan = random_plan(700, 4)
    memory = torch.randint(0, 255, (700, 3000), dtype=torch.uint8)
    x = memory[:, offset : offset + 2001]
    got, want = (fresh_memory(plan.num_rows, 2001, x.dtype, offset=offset) for _ in range(2))
    CPU.push_rows(x, plan.routes, got.addresses)
    REFERENCE.push_rows(x.contiguous(), plan.routes, want.addresses)
    assert_same_bits(got.bytes, want.bytes)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("weighted", [False, True])
def test_combine(dtype, columns, weighted):
    ids, plan = random_plan(9, 6)
    ids[4] = -1
    plan = plans(ids, expert_ranks(12, 3), 3, "expert_major")
    rows = fresh_memory(plan.num_rows, columns, dtype, fill=lambda shape: interesting(shape, dtype))
    weights = torch.randn(9, 6, dtype=weights_dtype(dtype)).masked_fill(ids < 0, float("nan")) if weighted else None
    got, want = (torch.full((9, columns), float("nan"), dtype=dtype) for _ in range(2))
    CPU.combine_rows(got, plan.routes, rows.addresses, weights=weights)
    REFERENCE.combine_rows(want, plan.routes, rows.addresses, weights=weights)
    assert_same_bits(got, want)
    assert not got[4].any()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_combine_is_the_plain_torch_sum(dtype):
    _, plan = random_plan(40, 5)
    rows = fresh_memory(plan.num_rows, 200, dtype, fill=lambda shape: torch.randn(shape).to(dtype))
    wide = weights_dtype(dtype)
    weights = torch.randn(40, 5, dtype=wide)
    want = torch.zeros(40, 200, dtype=wide)
    for t in range(40):
        for p in range(5):
            if plan.routes[t, p] >= 0:
                want[t] += weights[t, p] * rows.at(int(plan.routes[t, p])).to(wide)
    got = torch.empty(40, 200, dtype=dtype)
    CPU.combine_rows(got, plan.routes, rows.addresses, weights=weights)
    assert_same_bits(got, want.to(dtype))


@pytest.mark.parametrize("num_topk", [1, 2, 33, 64, 100])
def test_any_number_of_choices(num_topk):
    _, plan = random_plan(5, num_topk)
    rows = fresh_memory(plan.num_rows, 70, torch.float16, fill=lambda shape: interesting(shape, torch.float16))
    got, want = (torch.empty(5, 70, dtype=torch.float16) for _ in range(2))
    CPU.combine_rows(got, plan.routes, rows.addresses)
    REFERENCE.combine_rows(want, plan.routes, rows.addresses)
    assert_same_bits(got, want)


def test_every_half_and_bfloat16_survives():
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(1, -1)
        out = torch.empty_like(every)
        CPU.combine_rows(out, torch.zeros(1, 1, dtype=torch.int64), [every.data_ptr()])
        want = torch.where(every.isnan(), torch.tensor(float("nan"), dtype=dtype), every + 0.0)
        assert_same_bits(out, want)


def test_rounding_is_to_nearest_even():
    for dtype in (torch.float16, torch.bfloat16):
        exact = torch.cat([torch.randn(5000) * 2.0**e for e in range(-30, 18)])
        halves = torch.arange(0, 4096) * 2.0**-25  # ties among the smallest float16
        value = torch.cat([exact, halves, 65504 + torch.arange(0, 33.0)])
        one = torch.ones(1, 1, dtype=dtype)
        out = torch.empty(value.numel(), 1, dtype=dtype)
        routes = torch.zeros(value.numel(), 1, dtype=torch.int64)
        CPU.combine_rows(out, routes, [one.data_ptr()], weights=value[:, None])
        assert_same_bits(out[:, 0] + 0.0, value.to(dtype) + 0.0)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("columns", [*COLUMNS, 4096])
def test_scale_dot(dtype, columns):
    g, y = interesting((7, columns), dtype), interesting((7, columns), dtype, seed=1)
    g[3:], y[3:] = torch.randn(4, columns).to(dtype), torch.randn(4, columns).to(dtype)
    weights = torch.randn(7, dtype=weights_dtype(dtype))
    for got, want in zip(CPU.scale_dot(g, y, weights), REFERENCE.scale_dot(g, y, weights), strict=True):
        assert_same_bits(got, want)
    if columns:
        exact = (g[3:].double() * y[3:].double()).sum(1).to(weights.dtype)
        atol, rtol = (1e-11, 1e-12) if dtype is torch.float64 else (1e-3, 1e-4)
        torch.testing.assert_close(CPU.scale_dot(g, y, weights)[1][3:], exact, atol=atol, rtol=rtol)


def test_no_tokens():
    routes = torch.empty(0, 4, dtype=torch.int64)
    CPU.push_rows(torch.empty(0, 8), routes, [0])
    CPU.combine_rows(torch.empty(0, 8), routes, [0])
    assert CPU.pull_values(routes, [0]).shape == (0, 4)
    scaled, dots = CPU.scale_dot(torch.empty(0, 8), torch.empty(0, 8), torch.empty(0))
    assert scaled.shape == (0, 8)
    assert dots.shape == (0,)


def test_push_sends_one_row_many_times():
    _, plan = random_plan(9, 4)
    x = torch.randn(1, 100).expand(9, 100)
    got, want = (fresh_memory(plan.num_rows, 100, x.dtype) for _ in range(2))
    CPU.push_rows(x, plan.routes, got.addresses)
    REFERENCE.push_rows(x, plan.routes, want.addresses)
    assert_same_bits(got.bytes, want.bytes)


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, 65, 1000, 4096, 100_001])
@pytest.mark.parametrize("offset", [0, 1, 40])
def test_plain_streams(num_bytes, offset):
    memory = torch.randint(0, 256, (4 * num_bytes + 256,), dtype=torch.uint8)
    want = memory.clone()
    source, begin = memory[offset : offset + num_bytes], num_bytes + 64 + offset
    _C.stream_copy(memory.data_ptr() + begin, source.data_ptr(), num_bytes)
    want[begin : begin + num_bytes] = want[offset : offset + num_bytes]
    assert_same_bits(memory, want)
    _C.stream_scatter(memory.data_ptr() + begin, source.data_ptr(), 1, num_bytes, 3)
    want[begin : begin + 3 * num_bytes] = want[offset : offset + num_bytes].repeat(3)
    assert_same_bits(memory, want)
    words = torch.nn.functional.pad(source, (0, -num_bytes % 8)).view(torch.int64).tolist()
    expected = 0
    for word in words:
        expected ^= word
    assert _C.stream_read(source.data_ptr(), num_bytes) == expected % 2**64
