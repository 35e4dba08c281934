"""Streams between domains in one thread: rings of a few rows, many calls in flight, phases in any order."""

import random

import pytest
import torch
from exchange_ranks import HIDDEN, Batch, in_one_thread
from far_transports import PATHS
from hierarchical_cases import GRIDS, mixed_calls
from interleavings import run_at_random, run_in_turns
from tiny_rings import tiny_rings

from moecomm import Topology
from moecomm.transports import registry

ALL = torch.tensor([[0, 5], [2, 4]]).repeat(3, 1)  # of six tokens, each to two ranks, one in each domain of two


@pytest.fixture(autouse=True)
def known_transports(monkeypatch):
    """Registered for these tests alone: others look at all that are."""
    for name, path in PATHS.items():
        monkeypatch.setitem(registry._known, name, path)


def run_and_check(comms, seed):
    calls = mixed_calls(comms, 10 * seed)
    works = run_at_random(comms, [call for call, _ in calls], random.Random(seed))
    for rank, own in enumerate(works):
        for work, (_, check) in zip(own, calls, strict=True):
            check(work.wait(), rank)


@pytest.mark.parametrize(
    ("algorithm", "rings"), [("hierarchical", (2, 2)), ("hierarchical", (3, 2, 1)), ("auto", (2, 2))]
)
@pytest.mark.parametrize(
    ("transport", "topology"),
    [*(("local", grid) for grid in GRIDS), ("pairs-local", None), ("far-local", None)],
    ids=lambda value: str(value.domain_of) if isinstance(value, Topology) else str(value),
)
def test_any_order_over_rings_of_few_rows(transport, topology, algorithm, rings):
    num_ranks = 4 if topology is None else topology.num_ranks
    options = {"transport": transport, "topology": topology, "algorithm": algorithm, "max_in_flight": 4}
    with tiny_rings(*rings), in_one_thread(num_ranks, **options) as comms:
        for seed in range(6):
            run_and_check(comms, seed)
        if algorithm == "hierarchical":
            sent = [comm._exchanger.session.algorithms["throughput"].channels._num_sent for comm in comms]
            assert max(max(one.values()) for one in sent) > 10  # rings have wrapped around, time and again
        assert [comm.stats["receive_blocks_alive"] for comm in comms] == [0] * num_ranks


def test_calls_in_flight_share_a_channel_in_the_order_of_their_numbers():
    """A call that begins while chunks of an earlier one still wait for room must not send before it."""
    topology = Topology.grid(1, 1)
    with tiny_rings(), in_one_thread(2, topology=topology, algorithm="hierarchical", max_in_flight=8) as comms:
        batches = [Batch(2, seed) for seed in range(2, 10)]
        works = [[batch.send(comm, "dispatch_async") for batch in batches] for comm in comms]
        run_in_turns([work for own in works for work in reversed(own)])
        for rank, own in enumerate(works):
            for batch, work in zip(batches, own, strict=True):
                batch.check_received(work.wait(), rank)


@pytest.mark.parametrize("num_experts", [1 << 15, (1 << 15) + 2])
def test_ids_of_so_many_experts(num_experts):
    """The most that travel as two bytes each, and more."""
    options = {"topology": Topology.grid(1, 1), "algorithm": "hierarchical", "num_experts": num_experts}
    half = num_experts // 2
    idx = torch.tensor([[0, num_experts - 1], [half - 1, half], [num_experts - 1, -1]])
    with in_one_thread(2, **options) as comms:
        works = [comm.dispatch_async(torch.arange(3.0)[:, None] + torch.zeros(HIDDEN), idx) for comm in comms]
        run_in_turns(works)
        received = [work.wait() for work in works]
        for one, wanted in zip(received, ([0.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 2.0, 0.0, 2.0]), strict=True):
            assert one.x[:, 0].tolist() == wanted
        works = [comm.combine_async(one.x, one.handle) for comm, one in zip(comms, received, strict=True)]
        run_in_turns(works)
        for work in works:
            assert work.wait()[:, 0].tolist() == [0.0, 2.0, 2.0]


def test_a_dispatch_ends_when_all_that_can_write_here_have():
    """Rank 3 never gets to what its neighbour waits for; ranks 0 and 1 have their rows, and go on."""
    with in_one_thread(4, topology=Topology.grid(2, 2), algorithm="hierarchical") as comms:
        works = [comm.dispatch_async(torch.full((6, HIDDEN), float(comm.rank)), ALL) for comm in comms]
        works[3].step()  # grants, and has sent all it has for the other domain
        for _ in range(3):
            done = [work.done() for work in works[:3]]
        assert done == [True, True, False]
        for work in works[:2]:
            assert sorted(set(work.wait().x[:, 0].tolist())) == [0.0, 1.0, 2.0, 3.0]
        later = [comm.dispatch_async(torch.full((6, HIDDEN), 10.0 + comm.rank), ALL) for comm in comms[:2]]
        assert [work.done() for work in later] == [False, False]
        later += [comm.dispatch_async(torch.full((6, HIDDEN), 10.0 + comm.rank), ALL) for comm in comms[2:]]
        run_in_turns(works + later)
        for work in works[2:]:
            assert sorted(set(work.wait().x[:, 0].tolist())) == [0.0, 1.0, 2.0, 3.0]
        for work in later:
            assert sorted(set(work.wait().x[:, 0].tolist())) == [10.0, 11.0, 12.0, 13.0]


def test_a_sum_is_made_as_soon_as_its_answers_are_here():
    """Rank 3 does not go on, nor does rank 1, which asks it; the other two do not wait for them to make their sums."""
    with in_one_thread(4, topology=Topology.grid(2, 2), algorithm="hierarchical") as comms:
        works = [comm.dispatch_async(torch.full((6, HIDDEN), float(comm.rank)), ALL) for comm in comms]
        run_in_turns(works)
        received = [work.wait() for work in works]
        works = [comm.combine_async(one.x, one.handle) for comm, one in zip(comms, received, strict=True)]
        calls = [work._call for work in works]
        for _ in range(3):
            done = [work.done() for work in works[:3]]
        assert done == [False] * 3  # their rows may still be read
        assert [call.result is not None for call in calls] == [True, False, True, False]
        run_in_turns(works)
        for rank, work in enumerate(works):
            assert torch.equal(work.wait(), torch.full((6, HIDDEN), 2.0 * rank))
