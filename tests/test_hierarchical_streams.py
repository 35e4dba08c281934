"""Streams between domains in one thread: rings of a few rows, many calls in flight, phases in any order."""

import random

import pytest
from exchange_ranks import EXPERTS, Batch, in_one_thread
from far_transports import PATHS
from interleavings import receive_all, run_at_random, run_in_turns
from tiny_rings import tiny_rings

from moecomm import Topology
from moecomm.testing import reference_combine
from moecomm.testing.compare import assert_bitwise_equal
from moecomm.transports import registry

GRIDS = [Topology.grid(1, 1), Topology.grid(2, 2), Topology.grid(3, 1), Topology.grid(1, 3, 1)]


@pytest.fixture(autouse=True)
def known_transports(monkeypatch):
    """Registered for these tests alone: others look at all that are."""
    for name, path in PATHS.items():
        monkeypatch.setitem(registry._known, name, path)


def per_host_home(batch, rank, topology, weighted=False):
    """What `combine(..., reduce="per_host")` gives for the rows as they came."""
    ys = [batch.received(r).x for r in range(batch.num_ranks)]
    weights = batch.topk_weights(rank) if weighted else None
    return reference_combine(
        ys,
        batch.everything()[1],
        num_experts=EXPERTS,
        rank=rank,
        topk_weights=weights,
        domain_of=topology.domain_of,
    )


def mixed_calls(comms, seed):
    """Dispatches, cached dispatches and combines, which need only what has been received before; with their checks."""
    earlier = Batch(len(comms), seed)
    received = receive_all(comms, earlier)

    def dispatch(number):
        batch = Batch(len(comms), number)

        def check(got, rank):
            batch.check_received(got, rank, weighted=True)

        return (
            lambda c: batch.send(c, "dispatch_async", topk_weights=batch.topk_weights(c.rank)),
            check,
        )

    def flat(number):
        batch = Batch(len(comms), number)

        def check(got, rank):
            batch.check_received(got, rank, layout="flat")

        return lambda c: batch.send(c, "dispatch_async", layout="flat"), check

    def again():
        def check(got, rank):
            assert_bitwise_equal(got.x, earlier.received(rank).x, f"rank {rank}: cached dispatch")

        return (
            lambda c: c.dispatch_async(earlier.x(c.rank), handle=received[c.rank].handle),
            check,
        )

    def combine():
        return (
            lambda c: c.combine_async(received[c.rank].x, received[c.rank].handle),
            earlier.check_home,
        )

    def per_host():
        def check(got, rank):
            wanted = per_host_home(earlier, rank, comms[0].topology, weighted=True)
            assert_bitwise_equal(got, wanted, f"rank {rank}: per host")

        return (
            lambda c: c.combine_async(
                received[c.rank].x, received[c.rank].handle, earlier.topk_weights(c.rank), reduce="per_host"
            ),
            check,
        )

    return [dispatch(seed + 1), combine(), dispatch(seed + 2), again(), per_host(), flat(seed + 3), combine(), again()]


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
