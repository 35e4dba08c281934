"""What the benchmark takes for right and wrong, without any communication."""

from dataclasses import dataclass

import pytest
import torch

from moecomm.bench.bound import MemoryBound
from moecomm.bench.check import wrong_in_combine, wrong_in_dispatch
from moecomm.bench.config import BenchConfig, Routing
from moecomm.bench.workload import Workload, expert_scale, make_routing
from moecomm.testing import reference_combine, reference_dispatch


@dataclass
class Arrived:
    x: torch.Tensor
    topk_weights: torch.Tensor
    num_tokens_per_expert: torch.Tensor


CONFIGS = [
    BenchConfig(ranks=2, tokens=(6,), hidden=5, experts=4, topk=2),
    BenchConfig(ranks=3, tokens=(7,), hidden=3, experts=7, topk=3, dtype="float32", routing=Routing("masked", 0.4)),
    BenchConfig(ranks=2, tokens=(4,), hidden=8, experts=1, topk=3, dtype="float64"),
    BenchConfig(ranks=3, tokens=(5,), hidden=2, experts=2, topk=2, dtype="float16", routing=Routing("hot")),
]


def workloads(config):
    return [Workload(config, config.tokens[0], rank, check=True) for rank in range(config.ranks)]


def oracle(config, works):
    """What every rank receives, and what it gets back from experts that multiply by `expert_scale`."""
    inputs = [work.inputs for work in works]
    xs, idxs, weights = ([getattr(one, name) for one in inputs] for name in ("x", "topk_idx", "topk_weights"))
    received = [
        reference_dispatch(xs, idxs, weights, num_experts=config.experts, rank=rank) for rank in range(config.ranks)
    ]
    ys = [one.x * work.row_scale() for one, work in zip(received, works, strict=True)]
    combined = [
        reference_combine(ys, idxs, num_experts=config.experts, rank=rank, topk_weights=weights[rank])
        for rank in range(config.ranks)
    ]
    return [Arrived(one.x, one.topk_weights, one.num_tokens_per_expert) for one in received], combined


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_oracle_is_right_to_the_bit(config):
    works = workloads(config)
    received, combined = oracle(config, works)
    for work, arrived, out in zip(works, received, combined, strict=True):
        assert wrong_in_dispatch(work, arrived) == 0
        assert wrong_in_combine(work, out, scaled=True, exact=True) == 0
        assert wrong_in_combine(work, out, scaled=True, exact=False) == 0
        assert work.payload.received == arrived.x.shape[0]
        assert work.payload.routed == int((work.inputs.topk_idx >= 0).sum())


def test_slabs_are_compared_as_far_as_they_are_filled():
    config = CONFIGS[0]
    works = workloads(config)
    for work, arrived in zip(works, oracle(config, works)[0], strict=True):
        counts = arrived.num_tokens_per_expert.tolist()
        capacity = max(counts) + 2
        x = torch.full((len(counts), capacity, config.hidden), float("nan"), dtype=torch.bfloat16)
        weights = torch.zeros(len(counts), capacity)
        for slab, slab_weights, rows, row_weights in zip(
            x, weights, arrived.x.split(counts), arrived.topk_weights.split(counts), strict=True
        ):
            slab[: rows.shape[0]] = rows
            slab_weights[: rows.shape[0]] = row_weights
        assert wrong_in_dispatch(work, Arrived(x, weights, arrived.num_tokens_per_expert)) == 0
        x[0, 0, 1] += 1
        assert wrong_in_dispatch(work, Arrived(x, weights, arrived.num_tokens_per_expert)) == 1
        assert work.slab_scale().shape == (len(counts), 1, 1)
        per_row = work.slab_scale().flatten().repeat_interleave(arrived.num_tokens_per_expert.long())
        assert torch.equal(per_row, work.row_scale().flatten())


def test_every_kind_of_mistake_is_counted():
    config = CONFIGS[0]
    work = workloads(config)[0]
    received, combined = oracle(config, workloads(config))
    arrived, out = received[0], combined[0]
    num_rows, hidden = arrived.x.shape

    changed = arrived.x.clone()
    changed[1, 2] += 1
    changed[3, 0] = float("nan")
    assert wrong_in_dispatch(work, Arrived(changed, arrived.topk_weights, arrived.num_tokens_per_expert)) == 2
    swapped = arrived.topk_weights.clone()
    swapped[0] += 1e-6
    assert wrong_in_dispatch(work, Arrived(arrived.x, swapped, arrived.num_tokens_per_expert)) == 1
    short = Arrived(arrived.x[:-1], arrived.topk_weights, arrived.num_tokens_per_expert)
    assert wrong_in_dispatch(work, short) == num_rows * hidden
    assert wrong_in_dispatch(work, Arrived(arrived.x, arrived.topk_weights, arrived.num_tokens_per_expert + 1)) == 2

    for exact in (True, False):
        off = out.clone()
        off[2, 1] = float("nan")
        off[0, 0] += 0.5 + out[0, 0].abs()
        assert wrong_in_combine(work, off, scaled=True, exact=exact) == 2
        assert wrong_in_combine(work, out.float(), scaled=True, exact=exact) == out.numel()
        # The plain answer is not the scaled one: rows from the wrong expert would be seen.
        assert wrong_in_combine(work, out, scaled=False, exact=exact) > 0


def test_another_order_of_additions_is_let_through_only_where_it_may_be():
    config = BenchConfig(ranks=1, tokens=(64,), hidden=64, experts=8, topk=8, dtype="float32")
    work = Workload(config, 64, 0, check=True)
    total, magnitude = work.combined(0, 64, scaled=True)
    backwards = total + 3e-7 * magnitude
    assert wrong_in_combine(work, backwards, scaled=True, exact=False) == 0
    assert wrong_in_combine(work, backwards, scaled=True, exact=True) > 0


def test_experts_of_the_benchmark_differ_from_their_neighbours():
    scale = expert_scale(256)
    assert bool((scale[1:] != scale[:-1]).all())
    assert torch.equal(torch.log2(scale), torch.log2(scale).round())


@pytest.mark.parametrize("routing", [Routing("uniform"), Routing("zipf", 1.5), Routing("hot"), Routing("masked", 0.3)])
def test_routing_kinds_are_what_they_say(routing):
    idx = make_routing(routing, 2000, 16, 4, seed=1)
    assert idx.shape == (2000, 4)
    counts = torch.bincount(idx[idx >= 0], minlength=16)
    if routing.kind == "hot":
        assert counts[0] == 2000
    elif routing.kind == "zipf":
        assert counts.max() / counts.float().mean() == pytest.approx(1.5, abs=0.2)
    else:
        assert counts.max() / counts.float().mean() < 1.2
    masked_share = float((idx < 0).float().mean())
    assert masked_share == pytest.approx(0.3, abs=0.03) if routing.kind == "masked" else masked_share == 0


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_bound_moves_exactly_the_rows(config):
    work = workloads(config)[0]
    bound = MemoryBound(work)
    rows = bound.dispatch()
    assert rows.shape[0] == work.payload.routed
    times_written = [int((rows == row).all(dim=1).sum()) for row in work.inputs.x]
    low, rest = divmod(work.payload.routed, config.tokens[0])
    assert times_written == [low + (token < rest) for token in range(config.tokens[0])]
    assert bound.combine().shape == work.inputs.x.shape
