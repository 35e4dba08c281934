"""Streams between domains in one thread: rings of a few rows, many calls in flight, phases in any order."""

import random

import pytest
from exchange_ranks import Batch, in_one_thread
from far_transports import PATHS
from hierarchical_cases import GRIDS, mixed_calls
from interleavings import run_at_random, run_in_turns
from tiny_rings import tiny_rings

from moecomm import Topology
from moecomm.transports import registry


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


@pytest.mark.parametrize("algorithm", ["hierarchical", "auto"])
@pytest.mark.parametrize(
    ("transport", "topology"),
    [*(("local", grid) for grid in GRIDS), ("pairs-local", None), ("far-local", None)],
    ids=lambda value: str(value.domain_of) if isinstance(value, Topology) else str(value),
)
def test_any_order_over_rings_of_few_rows(transport, topology, algorithm):
    num_ranks = 4 if topology is None else topology.num_ranks
    options = {"transport": transport, "topology": topology, "algorithm": algorithm, "max_in_flight": 4}
    with tiny_rings(), in_one_thread(num_ranks, **options) as comms:
        for seed in range(6):
            run_and_check(comms, seed)
        if algorithm == "hierarchical":
            sent = [comm._exchanger.session.algorithms["throughput"].channels._num_sent for comm in comms]
            assert (
                max(max(one.values()) for one in sent) > 10
            )  # rings of two chunks have wrapped around, time and again
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
