"""Pushes after a wait that has failed: not a byte is written, whatever is pushed; without a failure all are."""

import pytest
import torch
from kernel_cases import assert_same_bits, expert_ranks, fresh_memory, ids_of, plans

from moecomm.kernels import kernels_for
from moecomm.kernels.triton import signals

TRITON = kernels_for("triton")
REFERENCE = kernels_for("reference")
TOKENS, TOPK, EXPERTS, RANKS = 9, 4, 12, 3


def status_after(*, fails):
    """What a wait leaves behind: one for a lane that is there, or is not."""
    status = signals.make_status(RANKS, "cpu")
    board = torch.full((RANKS,), 0 if fails else 1)
    signals.wait(board.data_ptr(), 0, 1, status=status, timeout_ns=1_000_000 if fails else 10_000_000_000)
    return status


def plan_of(layout="expert_major"):
    return plans(ids_of(TOKENS, TOPK, EXPERTS), expert_ranks(EXPERTS, RANKS), RANKS, layout)


def pushed(num_rows, columns, dtype, push, *, fails):
    """The memory of all ranks after a push by Triton with a status, and what it should be."""
    got, want = (fresh_memory(num_rows, columns, dtype) for _ in range(2))
    push(TRITON, got.addresses, {"status": status_after(fails=fails)})
    if not fails:
        push(REFERENCE, want.addresses, {})
    return got.bytes, want.bytes


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("columns", [8, 31, 5003])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_rows(columns, is_weighted, fails):
    plan = plan_of()
    x = torch.randn(TOKENS, columns)
    weights = torch.randn(TOKENS, TOPK) if is_weighted else None

    def push(kernels, addresses, options):
        kernels.push_rows(x, plan.routes, addresses, weights=weights, **options)

    assert_same_bits(*pushed(plan.num_rows, columns, x.dtype, push, fails=fails))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values(dtype, fails):
    plan = plan_of()
    values = torch.randn(TOKENS, TOPK, dtype=dtype)

    def push(kernels, addresses, options):
        kernels.push_values(values, plan.routes, addresses, **options)

    assert_same_bits(*pushed(plan.num_rows, 1, dtype, push, fails=fails))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_metadata_of_flat_rows(is_weighted, fails):
    plan = plan_of("flat")
    expert_rank = expert_ranks(EXPERTS, RANKS)
    local = torch.arange(EXPERTS, dtype=torch.int32)
    ids, weights = ids_of(TOKENS, TOPK, EXPERTS), torch.rand(TOKENS, TOPK) if is_weighted else None
    memories = []
    for kernels in (TRITON, REFERENCE):
        tables = [fresh_memory(plan.num_rows, TOPK, dtype) for dtype in (torch.int32, torch.float32)]
        memories.append([table.bytes for table in tables])
        options = {"status": status_after(fails=fails)} if kernels is TRITON else {}
        if kernels is REFERENCE and fails:
            continue
        where = tables[1].addresses if is_weighted else None
        kernels.push_flat_metadata(ids, weights, plan.routes, expert_rank, local, tables[0].addresses, where, **options)
    for got, want in zip(*memories, strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize(
    "status", [torch.zeros(7), torch.zeros(4).long(), torch.zeros(14).long()[::2], torch.zeros(7).long().to("meta")]
)
def test_what_is_no_status_is_refused(status):
    routes = torch.full((1, 1), -1)
    with pytest.raises(ValueError, match=r"status is torch.* on .*; wanted contiguous torch.int64 \[4 \+ R\] on cpu"):
        TRITON.push_rows(torch.zeros(1, 4), routes, [64], status=status)
    with pytest.raises(ValueError, match="status is"):
        TRITON.push_values(torch.zeros(1, 1), routes, [64], status=status)
