"""No kernel reads or writes outside its rows: rows of odd width and none, tokens that are few, none or many."""

import importlib

import pytest
import torch
import triton
import triton.language as tl
from expert_layouts import COUNTS, EXPERTS, TOKENS, TOPK, make_experts
from expert_layouts import ids_of as local_ids_of
from experts_oracle import expert_major
from interpreter_fences import fences
from kernel_cases import expert_ranks, fresh_memory, ids_of, plans
from triton.runtime.errors import InterpreterError

from moecomm.kernels import kernels_for
from moecomm.kernels.triton import eager_messages, signals
from moecomm.kernels.triton.grouped_swiglu import grouped_swiglu

TRITON = kernels_for("triton")
# The modules whose kernels are run here; the test of completeness asks for every one of them.
ROW_MODULES = ("combine", "counts", "eager_messages", "fingerprint", "flat", "gradients", "plans", "push", "signals")
MODULES = (*ROW_MODULES, "values", "gathered_rows", "grouped_gemm_cases")
NUM_EXPERTS, RANKS, K = 7, 3, 3
SIZES = [(0, 31), (1, 1), (5, 31), (9, 1031), (600, 5), (5, 0)]


@pytest.fixture
def fence(monkeypatch):
    with fences(monkeypatch) as fence:
        yield fence


@triton.jit
def off_by_one(rows, num_values, BLOCK: tl.constexpr, READS: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(rows + at, mask=at < (num_values + 1 if READS else num_values), other=0.0)
    tl.store(rows + at, value, mask=at < (num_values if READS else num_values + 1))


@pytest.mark.parametrize("reads", [False, True])
def test_one_number_too_many_is_caught(fence, reads):
    rows = torch.zeros(3, 5)[1]  # there is memory on both sides, so nothing else would notice
    with pytest.raises(
        InterpreterError, match="OutOfBounds.*a load of 4 bytes" if reads else "OutOfBounds.*a store of 4 bytes"
    ):
        off_by_one[(1,)](rows, 5, BLOCK=8, READS=reads)
    off_by_one[(1,)](rows, 4, BLOCK=8, READS=reads)


def run_rows(fence, num_tokens, columns, dtype, layout):
    """Every row kernel once; with and without weights and a status where they take them."""
    ids = ids_of(num_tokens, K, NUM_EXPERTS)
    expert_rank = expert_ranks(NUM_EXPERTS, RANKS)
    local = torch.arange(NUM_EXPERTS, dtype=torch.int32)
    counts = torch.zeros(NUM_EXPERTS + RANKS, dtype=torch.int32)
    TRITON.count_routes(ids, expert_rank, RANKS, counts)
    TRITON.plan_expert_major(ids, expert_rank, torch.zeros(NUM_EXPERTS, dtype=torch.int64))
    TRITON.plan_flat(ids, expert_rank, torch.zeros(RANKS, dtype=torch.int64))
    plan = plans(ids, expert_rank, RANKS, layout)
    # Rows with gaps between them, which are nobody's.
    x = torch.zeros(num_tokens, columns + 3, dtype=dtype)[:, :columns]
    for row in x:
        fence.allow(row)
    weights = torch.rand(num_tokens, K, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    fence.allow(weights)
    rows = fence.allow_rows(fresh_memory(plan.num_rows, columns, dtype), plan.num_rows)
    values = fence.allow_rows(fresh_memory(plan.num_rows, 1, weights.dtype), plan.num_rows)
    status = torch.zeros(4 + RANKS, dtype=torch.int64)
    for options in ({}, {"status": status}):
        TRITON.push_rows(x, plan.routes, rows.addresses, **options)
        TRITON.push_rows(x, plan.routes, rows.addresses, weights=weights, **options)
        TRITON.push_values(weights, plan.routes, values.addresses, **options)
    out = fence.allow(torch.zeros(num_tokens + 2, columns, dtype=dtype)[1:-1])
    TRITON.combine_rows(out, plan.routes, rows.addresses)
    TRITON.combine_rows(out, plan.routes, rows.addresses, weights=weights)
    TRITON.pull_values(plan.routes, values.addresses, dtype=weights.dtype)
    g, y = fence.allow(torch.zeros(num_tokens, columns, dtype=dtype), torch.zeros(num_tokens, columns, dtype=dtype))
    TRITON.scale_dot(g, y, weights[:, 0].contiguous())
    if layout == "flat":
        tables = [fresh_memory(plan.num_rows, K, kind) for kind in (torch.int32, weights.dtype)]
        to_ids, to_weights = (fence.allow_rows(table, plan.num_rows).addresses for table in tables)
        for options in ({}, {"status": status}):
            TRITON.push_flat_metadata(ids, weights, plan.routes, expert_rank, local, to_ids, to_weights, **options)
        TRITON.push_flat_metadata(ids, None, plan.routes, expert_rank, local, to_ids, None)
        TRITON.pull_flat_values(ids, plan.routes, expert_rank, to_weights, dtype=weights.dtype)


@pytest.mark.parametrize(("num_tokens", "columns"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["expert_major", "flat"])
def test_row_kernels(fence, layout, dtype, num_tokens, columns):
    run_rows(fence, num_tokens, columns, dtype, layout)


def run_messages(fence, num_tokens):
    ids = ids_of(num_tokens, K, NUM_EXPERTS).int()
    begins = torch.tensor([0, num_tokens // 3, num_tokens])
    expert_rank = expert_ranks(NUM_EXPERTS, 2)
    eager_messages.count_messages(ids, begins, expert_rank)
    eager_messages.row_sources(ids, begins, expert_rank, 1, torch.zeros(2, dtype=torch.int64), 16)


def run_signals(fence, num_ranks):
    boards = fence.allow(torch.zeros(num_ranks, 2, num_ranks, dtype=torch.int64))
    table = torch.tensor([board.data_ptr() for board in boards])
    status = signals.make_status(num_ranks, "cpu")
    signals.signal_all(table, 0, 1, status=status)
    signals.signal(table, num_ranks - 1, 0, peer=0)
    for at_least in (0, torch.tensor([1]), 5):
        signals.wait(boards.data_ptr(), 1, at_least, status=status, timeout_ns=1_000_000)


def run_experts(fence, hidden):
    """All three layouts, forward and backward, and rows gathered by any index."""
    experts = make_experts("triton", torch.float32, hidden=hidden)
    slab = torch.randn(EXPERTS, 9, hidden, requires_grad=True)
    experts(slab, num_tokens_per_expert=torch.tensor(COUNTS["mixed"])).sum().backward()
    x, weights = torch.randn(TOKENS, hidden, requires_grad=True), torch.rand(TOKENS, TOPK, requires_grad=True)
    experts(x, topk_idx=local_ids_of("mixed"), topk_weights=weights).sum().backward()
    experts(x, torch.tensor([2, 2, 5, 9])).sum().backward()
    case = expert_major([3, 0, 5], 2)
    tensors = [torch.randn(6, hidden), torch.randn(3, 10, hidden), torch.randn(3, hidden, 5)]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    row_idx = torch.randint(-1, 6, (case.num_rows,))
    grouped_swiglu(*tensors, segments=case.segments, row_idx=row_idx).sum().backward()


@pytest.mark.parametrize("num_tokens", [0, 1, 300])
def test_message_kernels(fence, num_tokens):
    run_messages(fence, num_tokens)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_signals_and_waits(fence, num_ranks):
    run_signals(fence, num_ranks)


@pytest.mark.parametrize("hidden", [1, 33])
def test_experts(fence, hidden):
    run_experts(fence, hidden)


def test_no_kernel_is_left_out(fence):
    run_rows(fence, 5, 31, torch.float32, "flat")
    run_messages(fence, 5)
    run_signals(fence, 2)
    run_experts(fence, 7)
    cases = [importlib.import_module(f"moecomm.kernels.triton.{name}").compile_cases() for name in MODULES]
    wanted = {case.kernel.fn.__name__ for some in cases for case in some}
    assert wanted - fence.kernels == set()
