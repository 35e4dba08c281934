"""What a communicator tells of itself (tokens by expert, how long it has waited for whom), and its results in short."""

import time

import pytest
import torch
from exchange_ranks import open_communicator
from low_latency_ranks import WORLDS

from moecomm.groups import SoloGroup
from moecomm.testing import launch, masked, uniform

HIDDEN, EXPERTS, TOPK, MOST = 16, 6, 2, 8


def count_tokens(group, transport):
    """Counts go on over both modes, all layouts and handles used again; calls that fail are not counted."""
    with open_communicator(group, max_tokens_per_rank=MOST, transport=transport) as comm:
        expected = torch.zeros(comm.num_local_experts, dtype=torch.int64)
        assert torch.equal(comm.tokens_per_expert, expected)
        options = [
            {"mode": mode, "layout": layout}
            for mode, layout in (
                ("throughput", "expert_major"),
                ("throughput", "flat"),
                ("low_latency", "slab"),
                ("low_latency", "expert_major"),
            )
        ]
        for number in range(8):
            ids = [masked((5, 0, 8)[(rank + number) % 3], EXPERTS, TOPK, seed=10 * number + rank) for rank in range(3)]
            arrived = torch.bincount(torch.cat([one[one >= 0] for one in ids]), minlength=EXPERTS)
            expected += arrived[comm.local_experts.start : comm.local_experts.stop]
            idx = ids[group.rank]
            x = torch.ones(idx.shape[0], HIDDEN)
            received = comm.dispatch(x, idx, **options[number % 4])
            assert torch.equal(comm.tokens_per_expert, expected), number
            comm.combine(received.x, received.handle)
            if number % 3 == 0:
                comm.dispatch(x, handle=received.handle)
                expected += arrived[comm.local_experts.start : comm.local_experts.stop]
            if number % 4 == 1:
                with pytest.raises(ValueError, match="hidden"):
                    comm.dispatch(x[:, 1:], idx, **options[number % 4])
        assert torch.equal(comm.tokens_per_expert, expected)
        assert comm.tokens_per_expert.dtype is torch.int64


def wait_for_one(group, mode):
    """Rank 1 is late on purpose; returns what each rank says of whom it has waited for."""
    delay, times = 0.05, 4
    with open_communicator(group, max_tokens_per_rank=MOST) as comm:
        for _ in range(3):
            step(comm, mode)
        before = comm.waiting_times
        for _ in range(times):
            if group.rank == 1:
                time.sleep(delay)
            step(comm, mode)
        after = comm.waiting_times
        for value in after:
            assert value.shape == (group.size,)
            assert value.dtype is torch.float32
        assert bool((after.longest <= after.total).all())
        return (after.total - before.total).tolist(), after.longest.tolist(), delay * times


def step(comm, mode):
    received = comm.dispatch(torch.ones(4, HIDDEN), uniform(4, EXPERTS, TOPK), mode=mode)
    comm.combine(received.x, received.handle)


@pytest.mark.parametrize("mode", ["throughput", "low_latency"])
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_slow_rank_stands_out(backend, mode):
    results = launch(wait_for_one, 3, mode, backend=backend)
    for rank, (total, longest, delayed) in enumerate(results):
        if rank == 1:
            continue
        other = 2 - rank
        assert total[1] > 0.7 * delayed, f"rank {rank} says it waited {total}"
        assert total[1] > 2 * total[other]
        assert longest[1] > 0.03
        assert longest[1] == max(longest)


@pytest.mark.parametrize(("backend", "transport"), WORLDS)
def test_tokens_are_counted_over_all_calls(backend, transport):
    launch(count_tokens, 3, transport, backend=backend)


def test_results_are_told_in_short():
    with open_communicator(SoloGroup(), max_tokens_per_rank=4) as comm:
        x, idx = torch.ones(2, HIDDEN, dtype=torch.bfloat16), torch.tensor([[0, 5], [1, -1]])
        flat = comm.dispatch(x, idx, torch.ones(2, 2), layout="flat")
        assert repr(flat) == (
            "Received(x=bfloat16[2, 16], topk_weights=float32[2, 2], topk_idx=int32[2, 2], "
            f"num_tokens_per_expert=int32[6], handle={flat.handle})"
        )
        assert repr(flat.handle) == (
            "Handle(mode='throughput', layout='flat', num_tokens=2, num_topk=2, num_rows=2, expert_alignment=1, "
            f"communicator={comm.id})"
        )
        slab = comm.dispatch(x, idx, mode="low_latency")
        assert "mode='low_latency', layout='slab'" in repr(slab)
        assert "num_rows=24, capacity=4, " in repr(slab.handle)
