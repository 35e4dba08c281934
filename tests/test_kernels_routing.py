"""Row kernels that count, plan, and move ids and values: by hand, by property, against the reference."""

import mmap
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import assert_same_bits, bytes_at, expert_ranks, fresh_memory, ids_of, plans

from moecomm import _C
from moecomm.kernels import available_kernels, kernels_for
from moecomm.kernels.base import make_route, rank_of, row_of
from moecomm.kernels.registry import chosen_eager_kernels, chosen_kernels, eager_kernels_for

REFERENCE = kernels_for("reference")
CPU = kernels_for("cpu")


@pytest.fixture(params=["cpu", "reference"])
def kernels(request):
    return kernels_for(request.param)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def count(kernels, ids, expert_rank, num_ranks):
    counts = torch.full((expert_rank.numel() + num_ranks,), -7, dtype=torch.int32)
    fingerprint = kernels.count_routes(ids, expert_rank, num_ranks, counts)
    return counts.tolist(), fingerprint


def test_counts_by_hand(kernels):
    ids = torch.tensor([[0, 3, 3], [-1, 1, 0], [-1, -1, -1]])
    counts, fingerprint = count(kernels, ids, int32(0, 0, 1, 1), 2)
    assert counts == [2, 1, 0, 2] + [2, 1]
    assert 0 <= fingerprint < 2**63


def test_plan_expert_major_by_hand(kernels):
    ids = torch.tensor([[0, 3, 3], [-1, 1, 0]])
    routes = kernels.plan_expert_major(ids, int32(0, 0, 1, 1), torch.tensor([10, 20, 30, 40]))
    assert routes.tolist() == [
        [make_route(0, 10), make_route(1, 40), make_route(1, 41)],
        [-1, make_route(0, 20), make_route(0, 11)],
    ]


def test_plan_flat_by_hand(kernels):
    ids = torch.tensor([[3, 0, 2], [-1, -1, -1], [1, 0, -1]])
    routes = kernels.plan_flat(ids, int32(0, 0, 1, 1), torch.tensor([5, 100]))
    assert routes.tolist() == [[make_route(0, 5), make_route(1, 100), -1], [-1, -1, -1], [make_route(0, 6), -1, -1]]


def test_flat_metadata_and_values_by_hand(kernels):
    ids = torch.tensor([[3, 0, 2], [1, -1, 0]])
    expert_rank, expert_local = int32(0, 0, 1, 1), int32(0, 1, 0, 1)
    routes = kernels.plan_flat(ids, expert_rank, torch.zeros(2, dtype=torch.int64))
    idx, weights = (
        [torch.full((2, 3), 99, dtype=torch.int32) for _ in range(2)],
        [torch.full((2, 3), 9.0), torch.full((1, 3), 9.0)],
    )
    given_weights = torch.tensor([[0.1, 0.2, 0.3], [0.4, float("nan"), 0.6]])
    idx_addresses, weight_addresses = [t.data_ptr() for t in idx], [t.data_ptr() for t in weights]
    kernels.push_flat_metadata(ids, given_weights, routes, expert_rank, expert_local, idx_addresses, weight_addresses)
    assert idx[0].tolist() == [[-1, 0, -1], [1, -1, 0]]
    assert idx[1].tolist() == [[1, -1, 0], [99, 99, 99]]
    assert_same_bits(weights[0], torch.tensor([[0, 0.2, 0], [0.4, 0, 0.6]]))
    assert_same_bits(weights[1], torch.tensor([[0.1, 0, 0.3]]))
    back = kernels.pull_flat_values(ids, routes, expert_rank, weight_addresses)
    assert_same_bits(back, torch.nan_to_num(given_weights))
    idx[0].fill_(99)
    kernels.push_flat_metadata(ids, None, routes, expert_rank, expert_local, idx_addresses, None)
    assert idx[0].tolist() == [[-1, 0, -1], [1, -1, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_go_and_come_back(kernels, dtype):
    ids = ids_of(50, 6, 12)
    plan = plans(ids, expert_ranks(12, 3), 3, "expert_major")
    values = torch.randn(50, 6, dtype=dtype).masked_fill(ids < 0, float("nan"))
    memory = fresh_memory(plan.num_rows, 1, dtype)
    kernels.push_values(values, plan.routes, memory.addresses)
    assert_same_bits(kernels.pull_values(plan.routes, memory.addresses, dtype=dtype), torch.nan_to_num(values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_flat_values_go_and_come_back(kernels, dtype):
    ids, expert_rank = ids_of(50, 6, 12), expert_ranks(12, 3)
    plan = plans(ids, expert_rank, 3, "flat")
    values = torch.randn(50, 6, dtype=dtype).masked_fill(ids < 0, float("nan"))
    idx, weights = fresh_memory(plan.num_rows, 6, torch.int32), fresh_memory(plan.num_rows, 6, dtype)
    kernels.push_flat_metadata(
        ids, values, plan.routes, expert_rank, torch.arange(12).int() % 4, idx.addresses, weights.addresses
    )
    back = kernels.pull_flat_values(ids, plan.routes, expert_rank, weights.addresses, dtype=dtype)
    assert_same_bits(back, torch.nan_to_num(values))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_plans_hold_their_promises(data):
    num_tokens, num_topk = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 9))
    num_experts, num_ranks = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 80))
    draw_list = lambda size, low, high: data.draw(st.lists(st.integers(low, high), min_size=size, max_size=size))  # noqa: E731
    ids = torch.tensor(draw_list(num_tokens * num_topk, -1, num_experts - 1)).long().reshape(num_tokens, num_topk)
    expert_rank = torch.tensor(draw_list(num_experts, 0, num_ranks - 1), dtype=torch.int32)
    counts, fingerprint = count(CPU, ids, expert_rank, num_ranks)
    assert (counts, fingerprint) == count(REFERENCE, ids, expert_rank, num_ranks)

    # Expert-major: each route once, rows of an expert in (t, k) order and next to each other from its base.
    bases = torch.tensor(draw_list(num_experts, 0, 2**33))
    routes = CPU.plan_expert_major(ids, expert_rank, bases)
    assert torch.equal(routes >= 0, ids >= 0)
    assert torch.equal(routes, REFERENCE.plan_expert_major(ids, expert_rank, bases))
    for expert in range(num_experts):
        got = routes[ids == expert].tolist()
        base = make_route(int(expert_rank[expert]), int(bases[expert]))
        assert got == list(range(base, base + counts[expert]))

    # Flat: one entry per distinct rank, ascending, rows of a rank in token order.
    bases = torch.tensor(draw_list(num_ranks, 0, 2**33))
    routes = CPU.plan_flat(ids, expert_rank, bases)
    assert torch.equal(routes, REFERENCE.plan_flat(ids, expert_rank, bases))
    rows = {rank: [] for rank in range(num_ranks)}
    for slots, experts in zip(routes.tolist(), ids.tolist(), strict=True):
        ranks = [rank_of(route) for route in slots if route >= 0]
        assert ranks == sorted({int(expert_rank[e]) for e in experts if e >= 0})
        assert slots[len(ranks) :] == [-1] * (num_topk - len(ranks))
        for route in slots[: len(ranks)]:
            rows[rank_of(route)].append(row_of(route))
    for rank in range(num_ranks):
        assert rows[rank] == list(range(int(bases[rank]), int(bases[rank]) + counts[num_experts + rank]))


def test_dtype_and_strides_do_not_matter(kernels):
    ids = ids_of(20, 5, 12)
    expert_rank = expert_ranks(12, 3)
    poisoned = torch.full((20, 3, 5), 10**6)
    poisoned[:, 1] = ids
    want = count(kernels, ids, expert_rank, 3)
    bases = torch.arange(12)
    for same in (ids.int(), poisoned[:, 1], ids.t().contiguous().t()):
        assert count(kernels, same, expert_rank, 3) == want
        assert torch.equal(
            kernels.plan_expert_major(same, expert_rank, bases), kernels.plan_expert_major(ids, expert_rank, bases)
        )
        assert torch.equal(
            kernels.plan_flat(same, expert_rank, bases[:3]), kernels.plan_flat(ids, expert_rank, bases[:3])
        )


def test_fingerprint_sees_order_shape_and_values():
    ids = ids_of(6, 4, 12)
    changed = [ids, ids.flip(0), ids.flip(1), ids.reshape(4, 6), ids[:5], ids.clone(), ids.clone()]
    changed[-1][5, 3] = (changed[-1][5, 3] + 2) % 12
    changed[-2][0, 0] = 3 if ids[0, 0] == -1 else -1
    prints = [count(CPU, each, expert_ranks(12, 3), 3)[1] for each in changed]
    assert len(set(prints)) == len(prints)
    assert len({count(CPU, torch.full((t, 2), -1), expert_ranks(12, 3), 3)[1] for t in range(50)}) == 50


@pytest.mark.parametrize("bad", [-2, 12, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bad_ids_are_named(kernels, bad, dtype):
    ids = ids_of(8, 4, 12).to(dtype)
    ids[5, 2] = bad
    with pytest.raises(ValueError, match=rf"topk_idx\[5, 2\] = {bad} .* 0 to 11, or -1"):
        count(kernels, ids, expert_ranks(12, 3), 3)


def test_bad_ids_of_64_bits_are_named():
    for bad in (2**32, 2**63 - 1, -(2**63)):
        with pytest.raises(ValueError, match=rf"topk_idx\[0, 0\] = {bad} "):
            count(CPU, torch.tensor([[bad]]), expert_ranks(12, 3), 3)


def test_offsets_beyond_32_bits():
    # Six GiB of a sparse file, of which a few pages are touched.
    file = os.memfd_create("sparse")
    os.ftruncate(file, 6 << 30)
    space = mmap.mmap(file, 6 << 30)
    os.close(file)
    address, row_bytes = torch.frombuffer(space, dtype=torch.uint8).data_ptr(), 7168 * 2
    far = (6 << 30) // row_bytes - 1
    assert far * row_bytes > 2**32
    routes = torch.tensor([[far, 0], [2**31 // row_bytes, 2**32 // row_bytes]])
    x = torch.randn(2, 7168).bfloat16()
    CPU.push_rows(x, routes, [address])
    for t, p in ((0, 0), (0, 1), (1, 0), (1, 1)):
        row = bytes_at(address + int(routes[t, p]) * row_bytes, row_bytes).view(torch.bfloat16)
        assert torch.equal(row, x[t])
    out = torch.empty_like(x)
    CPU.combine_rows(out, routes, [address])
    assert torch.equal(out, x + x)
    last = torch.tensor([[(6 << 30) // 4 - 1]])
    CPU.push_values(torch.tensor([[5.0]]), last, [address])
    assert CPU.pull_values(last, [address]).item() == 5.0
    space.close()


def test_wrong_arguments_are_named():
    ids, expert_rank = ids_of(4, 2, 12), expert_ranks(12, 3)
    routes = CPU.plan_expert_major(ids, expert_rank, torch.zeros(12, dtype=torch.int64))
    x, addresses = torch.zeros(4, 8), [1, 1, 1]
    wide = torch.zeros(8, 4).t()
    for error, match, call in [
        (
            TypeError,
            "topk_idx is torch.float32",
            lambda: CPU.plan_flat(x, expert_rank, torch.zeros(3, dtype=torch.int64)),
        ),
        (
            ValueError,
            r"bases .* wanted contiguous torch.int64 \[12\]",
            lambda: CPU.plan_expert_major(ids, expert_rank, routes),
        ),
        (TypeError, "counts is torch.float32", lambda: CPU.count_routes(ids, expert_rank, 3, torch.zeros(15))),
        (ValueError, r"counts is torch.int32 \[14\]", lambda: CPU.count_routes(ids, expert_rank, 3, int32(*range(14)))),
        (ValueError, r"expert_rank\[0\] = 2 is not a rank", lambda: count(CPU, ids, expert_rank, 2)),
        (ValueError, r"rows is \[3, 8\]", lambda: CPU.push_rows(x[:3], routes, addresses)),
        (ValueError, "rows has strides", lambda: CPU.push_rows(wide, routes, addresses)),
        (TypeError, "rows is torch.int64", lambda: CPU.push_rows(ids, routes, addresses, weights=torch.ones(4, 2))),
        (ValueError, r"weights is .* wanted .* \[4, 2\]", lambda: CPU.push_rows(x, routes, addresses, weights=x)),
        (TypeError, "routes is torch.float32", lambda: CPU.push_rows(x, x, addresses)),
        (TypeError, "out is torch.int32", lambda: CPU.combine_rows(x.int(), routes, addresses)),
        (ValueError, "out is .* with strides", lambda: CPU.combine_rows(wide, routes, addresses)),
        (ValueError, "out has 3 rows; routes has 4", lambda: CPU.combine_rows(x[:3], routes, addresses)),
        (ValueError, "no address|has none", lambda: CPU.push_rows(x, torch.full((4, 2), make_route(7, 0)), addresses)),
        (ValueError, "has none", lambda: CPU.combine_rows(x, torch.zeros(4, 2, dtype=torch.int64), [0])),
        (TypeError, "y is torch.float64", lambda: CPU.scale_dot(x, x.double(), torch.ones(4))),
        (ValueError, "weights is", lambda: CPU.scale_dot(x, x, torch.ones(5))),
        (TypeError, "weights is torch.float64", lambda: CPU.scale_dot(x, x, torch.ones(4).double())),
        (TypeError, "weights is torch.float32", lambda: CPU.scale_dot(x.double(), x.double(), torch.ones(4))),
        (TypeError, "values is torch.bfloat16", lambda: CPU.push_values(x[:, :2].bfloat16(), routes, addresses)),
        (TypeError, "dtype is torch.int32", lambda: CPU.pull_values(routes, addresses, dtype=torch.int32)),
        (
            ValueError,
            "together",
            lambda: CPU.push_flat_metadata(ids, None, routes, expert_rank, expert_rank, addresses, addresses),
        ),
    ]:
        with pytest.raises(error, match=match):
            call()


def test_instruction_sets_by_name():
    features = _C.cpu_features()
    assert list(features) == ["generic", "avx2", "avx512"]
    assert features["generic"]
    try:
        for name, is_there in features.items():
            if is_there:
                _C.set_instruction_set(name)
                assert _C.instruction_set() == name
        with pytest.raises(ValueError, match=r"'sse9' is not available here; available: auto, generic"):
            _C.set_instruction_set("sse9")
    finally:
        _C.set_instruction_set("auto")


def test_kernels_by_name():
    assert available_kernels() == ["cpu", "reference", "triton"]
    assert kernels_for("cpu") is kernels_for("cpu")
    with pytest.raises(ValueError, match="'cuda'; there are kernels for cpu, reference, triton"):
        kernels_for("cuda")


def test_without_triton_all_else_works_and_the_message_says_what_to_do():
    program = """
import sys
sys.modules["triton"] = None  # as if it were not installed
from moecomm.kernels import kernels_for
assert kernels_for("cpu")
assert not [name for name in sys.modules if name.startswith("moecomm.kernels.triton")]
kernels_for("triton")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.endswith("ImportError: the kernels 'triton' need Triton: pip install triton\n"), done.stderr


def test_the_environment_names_the_kernels_of_communicators(monkeypatch):
    assert chosen_kernels("cpu") is kernels_for("cpu")
    assert chosen_eager_kernels("cpu") is eager_kernels_for("cpu")
    monkeypatch.setenv("MOECOMM_KERNELS", "reference")
    assert chosen_kernels("cpu") is kernels_for("reference")
    assert chosen_eager_kernels("cpu") is eager_kernels_for("reference")
    monkeypatch.setenv("MOECOMM_KERNELS", "abacus")
    with pytest.raises(ValueError, match="MOECOMM_KERNELS is 'abacus'; there are kernels for cpu, reference, triton"):
        chosen_kernels("cpu")
