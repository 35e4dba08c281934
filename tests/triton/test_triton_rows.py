"""Row kernels in Triton, interpreted: the contract, and what it leaves out, bit by bit against the reference."""

import os
import subprocess
import sys

import pytest
import torch
from kernel_cases import (
    FLOAT_DTYPES,
    assert_same_bits,
    bytes_at,
    expert_ranks,
    fresh_memory,
    ids_of,
    interesting,
    plans,
)

from moecomm import _C
from moecomm.kernels import kernels_for
from moecomm.kernels.base import make_route, weights_dtype
from moecomm.kernels.triton.tiles import moves_of, tile_of
from moecomm.testing.contracts import kernels as contract

TRITON = kernels_for("triton")
CPU = kernels_for("cpu")
REFERENCE = kernels_for("reference")
COLUMNS = [0, 1, 31, 256, 5003]


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_contract(check):
    check(TRITON)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("num_tokens", "num_topk"), [(0, 3), (1, 0), (1, 1), (700, 7), (9, 64)])
def test_counts_and_fingerprint_are_those_of_the_native_kernels(num_tokens, num_topk, dtype):
    """More ids than one program looks at, and more experts and ranks than it compares at once."""
    num_experts, num_ranks = 150, 19
    ids = ids_of(num_tokens, num_topk, num_experts).to(dtype)
    expert_rank = expert_ranks(num_experts, num_ranks)
    got, want = (torch.full((num_experts + num_ranks,), -7, dtype=torch.int32) for _ in range(2))
    assert TRITON.count_routes(ids, expert_rank, num_ranks, got) == CPU.count_routes(ids, expert_rank, num_ranks, want)
    assert_same_bits(got, want)


@pytest.mark.parametrize("layout", ["expert_major", "flat"])
@pytest.mark.parametrize(("num_tokens", "num_topk"), [(0, 3), (1, 0), (1, 1), (700, 7), (9, 64)])
def test_plans_of_many_blocks(num_tokens, num_topk, layout):
    num_experts, num_ranks = 150, 19
    ids = ids_of(num_tokens, num_topk, num_experts)
    expert_rank = expert_ranks(num_experts, num_ranks)
    name, size = ("plan_flat", num_ranks) if layout == "flat" else ("plan_expert_major", num_experts)
    bases = torch.arange(size) * (2**32 + 1)
    got, want = (getattr(kernels, name)(ids, expert_rank, bases) for kernels in (TRITON, CPU))
    assert_same_bits(got, want)


def test_all_ids_the_same():
    ids = torch.full((200, 2), 1)
    expert_rank = expert_ranks(3, 2)
    for name, size in (("plan_flat", 2), ("plan_expert_major", 3)):
        bases = torch.zeros(size, dtype=torch.int64)
        got, want = (getattr(kernels, name)(ids, expert_rank, bases) for kernels in (TRITON, CPU))
        assert_same_bits(got, want)


def test_experts_at_no_rank_are_refused():
    counts = torch.zeros(5, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"expert_rank\[1\] = 2 is not a rank: valid ranks are 0 to 1"):
        TRITON.count_routes(torch.zeros(1, 1).long(), torch.tensor([0, 2, 1], dtype=torch.int32), 2, counts)


def random_plan(num_tokens, num_topk, layout="expert_major"):
    ids = ids_of(num_tokens, num_topk, 12)
    return plans(ids, expert_ranks(12, 3), 3, layout)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("layout", ["expert_major", "flat"])
def test_push_copies_bytes(dtype, columns, layout):
    plan = random_plan(9, 4, layout)
    x = torch.randint(0, 256, (9 * columns * dtype.itemsize,), dtype=torch.uint8).view(dtype).reshape(9, columns)
    got, want = (fresh_memory(plan.num_rows, columns, dtype) for _ in range(2))
    TRITON.push_rows(x, plan.routes, got.addresses)
    REFERENCE.push_rows(x, plan.routes, want.addresses)
    assert_same_bits(got.bytes, want.bytes)


@pytest.mark.parametrize("offset", [1, 2, 4, 8, 16])
def test_push_reads_strided_rows_and_writes_to_any_address(offset):
    plan = random_plan(7, 3)
    for columns in (2001, 2048):
        x = torch.randint(0, 255, (7, 3000), dtype=torch.uint8)[:, offset : offset + columns]
        got, want = (fresh_memory(plan.num_rows, columns, x.dtype, offset=offset) for _ in range(2))
        TRITON.push_rows(x, plan.routes, got.addresses)
        REFERENCE.push_rows(x.contiguous(), plan.routes, want.addresses)
        assert_same_bits(got.bytes, want.bytes)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_push_scales_and_combine_sums_any_number(dtype, columns):
    """Infinities, NaN, numbers too small to be normal; a token without routes."""
    plan = random_plan(6, 5)
    plan.routes[4] = -1
    x = interesting((6, columns), dtype)
    weights = torch.randn(6, 5, dtype=weights_dtype(dtype)).masked_fill(plan.routes < 0, float("nan"))
    got, want = (fresh_memory(plan.num_rows, columns, dtype) for _ in range(2))
    TRITON.push_rows(x, plan.routes, got.addresses, weights=weights)
    REFERENCE.push_rows(x, plan.routes, want.addresses, weights=weights)
    assert_same_bits(got.bytes, want.bytes)
    rows = fresh_memory(plan.num_rows, columns, dtype, fill=lambda shape: interesting(shape, dtype))
    for scale in (None, weights):
        guarded = [torch.full((8, columns), 7.0, dtype=dtype) for _ in range(2)]
        TRITON.combine_rows(guarded[0][1:7], plan.routes, rows.addresses, weights=scale)
        REFERENCE.combine_rows(guarded[1][1:7], plan.routes, rows.addresses, weights=scale)
        assert_same_bits(*guarded)
        assert not guarded[0][5].any()


@pytest.mark.parametrize("num_topk", [1, 33, 64, 100])
def test_any_number_of_choices(num_topk):
    plan = random_plan(3, num_topk)
    rows = fresh_memory(plan.num_rows, 70, torch.float16, fill=lambda shape: interesting(shape, torch.float16))
    got, want = (torch.empty(3, 70, dtype=torch.float16) for _ in range(2))
    TRITON.combine_rows(got, plan.routes, rows.addresses)
    REFERENCE.combine_rows(want, plan.routes, rows.addresses)
    assert_same_bits(got, want)


def test_rounding_is_to_nearest_even():
    for dtype in (torch.float16, torch.bfloat16):
        exact = torch.cat([torch.randn(500) * 2.0**e for e in range(-30, 18)])
        halves = torch.arange(0, 4096) * 2.0**-25  # ties among the smallest float16
        value = torch.cat([exact, halves, 65504 + torch.arange(0, 33.0)])
        one = torch.ones(1, 1, dtype=dtype)
        out = torch.empty(value.numel(), 1, dtype=dtype)
        routes = torch.zeros(value.numel(), 1, dtype=torch.int64)
        TRITON.combine_rows(out, routes, [one.data_ptr()], weights=value[:, None])
        assert_same_bits(out[:, 0] + 0.0, value.to(dtype) + 0.0)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("columns", [0, 1, 33, 515])
def test_scale_dot(dtype, columns):
    g, y = interesting((7, columns), dtype), interesting((7, columns), dtype, seed=1)
    g[3:], y[3:] = torch.randn(4, columns).to(dtype), torch.randn(4, columns).to(dtype)
    weights = torch.randn(7, dtype=weights_dtype(dtype))
    for got, want in zip(TRITON.scale_dot(g, y, weights), REFERENCE.scale_dot(g, y, weights), strict=True):
        assert_same_bits(got, want)


def test_no_tokens():
    routes = torch.empty(0, 4, dtype=torch.int64)
    TRITON.push_rows(torch.empty(0, 8), routes, [0])
    TRITON.combine_rows(torch.empty(0, 8), routes, [0])
    assert TRITON.pull_values(routes, [0]).shape == (0, 4)
    scaled, dots = TRITON.scale_dot(torch.empty(0, 8), torch.empty(0, 8), torch.empty(0))
    assert scaled.shape == (0, 8)
    assert dots.shape == (0,)


def test_addresses_may_be_a_tensor():
    plan = random_plan(5, 3)
    x = torch.randn(5, 12)
    got, want = (fresh_memory(plan.num_rows, 12, x.dtype) for _ in range(2))
    TRITON.push_rows(x, plan.routes, torch.tensor(got.addresses))
    REFERENCE.push_rows(x, plan.routes, want.addresses)
    assert_same_bits(got.bytes, want.bytes)
    with pytest.raises(ValueError, match=r"addresses is torch.float32 \[2\] on cpu; wanted torch.int64 \[R\]"):
        TRITON.push_rows(x, plan.routes, torch.zeros(2))


@pytest.mark.parametrize("addresses", [[64], [64, 0]])
def test_a_route_without_an_address_is_refused(addresses):
    routes = torch.tensor([[make_route(1, 0)]])
    with pytest.raises(ValueError, match=rf"names rank 1, but addresses \(of {len(addresses)} ranks\) has none for it"):
        TRITON.push_rows(torch.zeros(1, 4), routes, addresses)
    with pytest.raises(ValueError, match="names rank 1"):
        TRITON.combine_rows(torch.zeros(1, 4), routes, addresses)
    with pytest.raises(ValueError, match="names rank 1"):
        TRITON.pull_values(routes, addresses)


def test_numbers_at_odd_addresses_are_refused():
    memory = torch.zeros(65, dtype=torch.uint8)
    routes = torch.zeros(1, 1, dtype=torch.int64)
    odd = [memory.data_ptr() + 2]
    with pytest.raises(ValueError, match="a row begins at a multiple of 2 bytes; torch.float32 needs 4"):
        TRITON.combine_rows(torch.zeros(1, 4), routes, odd)
    with pytest.raises(ValueError, match="addresses begins at a multiple of 2 bytes; torch.float64 needs 8"):
        TRITON.pull_values(routes, odd, dtype=torch.float64)


def test_wrong_arguments_are_named():
    routes = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"rows is \[3, 4\] on cpu; wanted \[2, H\] on cpu like routes"):
        TRITON.push_rows(torch.zeros(3, 4), routes, [64])
    with pytest.raises(ValueError, match="rows has strides"):
        TRITON.push_rows(torch.zeros(4, 2).t(), routes, [64])
    with pytest.raises(TypeError, match=r"weights is torch.float64 \[2, 1\] on cpu; wanted contiguous torch.float32"):
        TRITON.push_rows(torch.zeros(2, 4), routes, [64], weights=torch.zeros(2, 1, dtype=torch.float64))
    with pytest.raises(ValueError, match="out has 3 rows; routes has 2"):
        TRITON.combine_rows(torch.zeros(3, 4), routes, [64])
    with pytest.raises(ValueError, match="routes is on meta; with TRITON_INTERPRET=1 Triton kernels take CPU tensors"):
        TRITON.pull_values(routes.to("meta"), [64])


def test_without_the_interpreter_cpu_tensors_are_refused():
    program = """
import torch
from moecomm.kernels import kernels_for
kernels_for("triton").pull_values(torch.zeros(1, 1).long(), [64])
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert "routes is on cpu; Triton kernels take CUDA tensors, or CPU tensors if TRITON_INTERPRET=1" in done.stderr


# -- far away ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "columns"), [(2**31 + 5, 1), (600_000, 4096)])
def test_rows_beyond_two_to_the_31(row, columns):
    """Address space is free: rows lie up to 4 GB behind the first, and few pages of them exist."""
    space = _C.Mapping.create_private((row + 3) * columns * 2)
    routes = torch.tensor([[row, -1, row + 2], [3, row + 1, -1]])
    x = torch.randn(2, columns).half()
    weights = torch.randn(2, 3)
    for scale in (None, weights):
        TRITON.push_rows(x, routes, [space.address], weights=scale)
        for t, p in ((0, 0), (0, 2), (1, 0), (1, 1)):
            found = bytes_at(space.address + int(routes[t, p]) * columns * 2, columns * 2).view(torch.float16)
            assert_same_bits(found, x[t] if scale is None else (weights[t, p] * x[t].float()).half())
        got, want = (torch.empty(2, columns, dtype=torch.float16) for _ in range(2))
        TRITON.combine_rows(got, routes, [space.address], weights=scale)
        REFERENCE.combine_rows(want, routes, [space.address], weights=scale)
        assert_same_bits(got, want)
    assert space.resident_bytes() < 64 << 20


def test_values_beyond_two_to_the_31():
    row = 2**31 + 5
    space = _C.Mapping.create_private((row + 2) * 3 * 8)
    routes = torch.tensor([[row, -1], [1, row + 1]])
    values = torch.randn(2, 2, dtype=torch.float64)
    TRITON.push_values(values, routes, [space.address])
    assert bytes_at(space.address + row * 8, 8).view(torch.float64)[0] == values[0, 0]
    assert_same_bits(
        TRITON.pull_values(routes, [space.address], dtype=torch.float64), values.masked_fill(routes < 0, 0.0)
    )
    ids = torch.tensor([[0, -1, 1]])
    expert_rank, expert_local = torch.zeros(2, dtype=torch.int32), torch.arange(2, dtype=torch.int32)
    flat = torch.tensor([[row, -1, -1]])
    table = _C.Mapping.create_private((row + 2) * 3 * 4)
    weights = torch.randn(1, 3, dtype=torch.float64)
    TRITON.push_flat_metadata(ids, weights, flat, expert_rank, expert_local, [table.address], [space.address])
    assert bytes_at(table.address + row * 12, 12).view(torch.int32).tolist() == [0, -1, 1]
    back = TRITON.pull_flat_values(ids, flat, expert_rank, [space.address], dtype=torch.float64)
    assert_same_bits(back, weights.masked_fill(ids < 0, 0.0))


def test_tiles_cover_all_rows_and_no_tile_is_larger_than_its_registers():
    for row_bytes in (1, 2, 64, 260, 4096, 14336, 100_001):
        for alignment in (1, 2, 4, 8, 16):
            if row_bytes % alignment:
                continue
            moves = moves_of(row_bytes, alignment)
            for num_tokens in (1, 5, 4096, 2**33):
                tile = tile_of(num_tokens, moves)
                pieces = -(-moves.num_columns // tile.columns)
                assert tile.tokens * (tile.num_programs // pieces) >= num_tokens
                assert tile.num_programs % pieces == 0
                assert tile.tokens * tile.columns <= 4096
                assert tile.tokens * tile.columns * moves.dtype.primitive_bitwidth <= 8 * 16384
