"""Exchanges between ranks that cannot address each other: the whole contract, over transports that deliver as late as
they may and in reverse order, with all ranks apart and with pairs that share their memory.
"""

import random

import numpy as np
import pytest
import torch
from exchange_ranks import Batch, caught, in_one_thread, open_communicator
from far_transports import PATHS, FarLocalTransport
from interleavings import receive_all, run_in_turns

from moecomm.algorithms.far_rows import FarRows
from moecomm.algorithms.plan import plan_exchange
from moecomm.placement import Placement
from moecomm.testing import launch
from moecomm.testing.compare import assert_bitwise_equal
from moecomm.testing.contracts import World, algorithm, domains, low_latency
from moecomm.transports import registry

WORLDS = [
    World("stepped", "far-local", rank_counts=(1, 2, 3)),
    World("threads", "pairs-local", rank_counts=(2, 3, 5)),
]


@pytest.fixture(autouse=True)
def known_transports(monkeypatch):
    """Registered for these tests alone: others look at all that are."""
    for name, path in PATHS.items():
        monkeypatch.setitem(registry._known, name, path)


@pytest.mark.parametrize(
    "check", [*algorithm.CHECKS, *domains.CHECKS, *low_latency.CHECKS], ids=lambda check: check.__name__
)
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_contract(world, check):
    check(world)


def many_calls(group, transport, mode, results):
    """Calls of changing size in flight, waited for in some order, windows and memory used time and again."""
    random.seed(4)
    with open_communicator(group, transport=transport, max_in_flight=3) as comm:
        home = []
        for first in range(0, 24, 3):
            batches = [Batch(group.size, first + i, torch.bfloat16) for i in range(3)]
            works = [batch.send(comm, "dispatch_async", mode=mode) for batch in batches]
            received = [work.wait() for work in works]
            weights = [batch.topk_weights(comm.rank) for batch in batches]
            outputs = [one.x * 3 for one in received]
            works = [comm.combine_async(y, one.handle, w) for y, one, w in zip(outputs, received, weights, strict=True)]
            order = random.sample(range(3), 3)
            done = {index: works[index].wait() for index in order}
            home += [done[index] for index in range(3)]
            again = comm.dispatch(batches[0].x(comm.rank), handle=received[0].handle)
            assert_bitwise_equal(again.x, received[0].x, "cached dispatch")
        results[comm.rank, transport, mode] = home


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_same_bits_as_between_near_ranks(num_ranks):
    results = {}
    for transport in ("local", "far-local", "pairs-local"):
        for mode in ("throughput", "low_latency"):
            launch(many_calls, num_ranks, transport, mode, results, backend="threads")
    for rank in range(num_ranks):
        wanted = results[rank, "local", "throughput"]
        for transport in ("far-local", "pairs-local"):
            for mode in ("throughput", "low_latency"):
                for got, want in zip(results[rank, transport, mode], wanted, strict=True):
                    assert_bitwise_equal(got, want, f"{transport}, {mode}")


def send_home(group, puts):
    """Six experts on rank 1; rank 0's rows come back from there: eight, of 32 KiB, in runs of 1, 0, 2, 1, 3 and 1."""
    hidden = 8192
    with open_communicator(group, transport="far-local", num_experts=12, hidden=hidden, num_topk=1) as comm:
        experts = [6, 8, 8, 9, 10, 10, 10, 11] if comm.rank == 0 else []
        x = torch.arange(len(experts) * hidden, dtype=torch.float32).view(-1, hidden)
        received = comm.dispatch(x, torch.tensor(experts, dtype=torch.int64).view(-1, 1), layout="expert_major")
        transport = comm._exchanger.session.transport
        put = transport.put

        def note(region, offset, address, nbytes, rank):
            puts.append(nbytes >> 15)
            put(region, offset, address, nbytes, rank)

        transport.put = note if comm.rank == 1 else put
        out = comm.combine(received.x + 1, received.handle)
        assert_bitwise_equal(out, x + 1, "combine")


def test_short_runs_travel_home_together_and_long_ones_do_not_grow():
    puts = []
    launch(send_home, 2, puts, backend="threads")
    # Up to 128 KiB in one message.
    assert [count for count in puts if count] == [4, 4]


@pytest.mark.parametrize("mode", ["throughput", "low_latency"])
def test_nothing_is_copied_that_is_sent_anyway(mode):
    """Where all peers are far, outputs need not lie in receive memory."""
    with in_one_thread(2, transport="far-local") as comms:
        batch = Batch(2, 1)
        received = receive_all(comms, batch, mode=mode)
        outputs = [one.x.clone() for one in received]
        run_in_turns([c.combine_async(y, r.handle) for c, y, r in zip(comms, outputs, received, strict=True)])
        assert [comm.stats["copies"] for comm in comms] == [0, 0]


def exceed(group):
    """The rows that come home need receive memory, too, and all ranks learn where it lacks."""
    batch = Batch(group.size, 1)
    limit = 1 << 20 if group.rank == 0 else 4096
    with open_communicator(group, transport="far-local", memory_limit=limit) as comm:
        received = batch.send(comm)
        name, text, _ = caught(lambda: comm.combine(received.x, received.handle))
        assert name == "MemoryLimitExceeded", text
        return text


def test_memory_for_rows_that_come_home_is_limited():
    texts = launch(exceed, 2, backend="threads")
    assert texts[0] == texts[1]
    assert "rank 1" in texts[0]


def test_packed_rows_of_every_pair_of_ranks():
    """Each row once, no gaps, in the order in which the rows lie at their rank."""
    placement = Placement(7, 4)
    counts = np.random.default_rng(3).integers(0, 6, (4, 11)).astype(np.int32)
    for layout, columns in (("expert_major", slice(0, 7)), ("flat", slice(7, 11))):
        for source in range(4):
            far = [rank for rank in range(4) if rank // 2 != source // 2]
            rows = FarRows(counts, placement, source, far, layout, 2 if layout == "expert_major" else 1)
            plan = plan_exchange(counts, placement, source, layout, 2 if layout == "expert_major" else 1)
            taken = []
            for rank in far:
                runs = rows.runs(rank)
                assert [there for there, _, _ in runs] == sorted(there for there, _, _ in runs)
                taken += [here + i for _, here, count in runs for i in range(count)]
                assert all(there + count <= plan.rows_per_rank[rank] for there, _, count in runs)
            assert taken == list(range(rows.num_rows))
            ranks = placement.rank_of_expert if layout == "expert_major" else np.arange(4)
            near = ~np.isin(ranks, far)
            assert rows.bases[near].tolist() == plan.bases[near].tolist()
            assert rows.num_rows == counts[source, columns][np.isin(ranks, far)].sum()


class OneWayTransport(FarLocalTransport):
    """Rank 0 can address rank 1, but not the reverse."""

    def _is_far(self, rank):
        return self.rank == 1 and rank == 0


def test_addresses_must_be_mutual(monkeypatch):
    monkeypatch.setattr(FarLocalTransport, "_is_far", OneWayTransport._is_far)

    def construct(group):
        with pytest.raises(ValueError, match=r"only one can address the other: \[\(1, 0\)\]"):
            open_communicator(group, transport="far-local")

    launch(construct, 2, backend="threads")
