"""Low-latency dispatches over rails: one message per domain, read by its ranks in the memory of one; the bits, the
bytes, messages that are late, ranks that refuse or leave.
"""

import ctypes
import random
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest
import torch
from exchange_ranks import EXPERTS, HIDDEN, Batch, caught, in_one_thread, open_communicator
from far_transports import PATHS, PairsLocalTransport
from interleavings import receive_all, run_at_random, run_in_turns
from low_latency_ranks import check_exchange, check_received

from moecomm import Topology
from moecomm.algorithms.holder_lanes import HolderLanes
from moecomm.testing import launch
from moecomm.testing.compare import assert_bitwise_equal
from moecomm.transports import registry
from moecomm.transports.base import WaitOutcome

GRIDS = [Topology.grid(2, 2), Topology.grid(2, 1), Topology.grid(3, 1), Topology.grid(2, 2, 2), Topology.grid(1, 3, 2)]
SIZES = {"max_tokens_per_rank": 8}


class HeldTransport(PairsLocalTransport):
    """What is sent from one rank to another may be held back, signals included, and let go of later."""

    name = "held-local"
    held = {}

    def put(self, region, offset, address, nbytes, rank):
        if (self.rank, rank) in self.held:
            data = ctypes.create_string_buffer(ctypes.string_at(address, nbytes), nbytes)
            self.held[self.rank, rank].append(partial(self._put_late, region, offset, data, rank))
            return
        super().put(region, offset, address, nbytes, rank)

    def _put_late(self, region, offset, data, rank):
        super().put(region, offset, ctypes.addressof(data), len(data), rank)

    def signal(self, rank, slot, n=1):
        if (self.rank, rank) in self.held:
            self.held[self.rank, rank].append(partial(super().signal, rank, slot, n))
            return
        super().signal(rank, slot, n)


@pytest.fixture(autouse=True)
def known_transports(monkeypatch):
    """Registered for these tests alone: others look at all that are."""
    for name, path in {**PATHS, "held-local": "test_low_latency_rails:HeldTransport"}.items():
        monkeypatch.setitem(registry._known, name, path)


@contextmanager
def holding(source, destination):
    """Holds back what the one sends to the other; gives a function that lets go of it."""
    kept = HeldTransport.held[source, destination] = []

    def let_go():
        HeldTransport.held.pop((source, destination), None)
        while kept:
            kept.pop(0)()

    try:
        yield let_go
    finally:
        HeldTransport.held.clear()


def send_all(comms, batch):
    return [batch.send(comm, "dispatch_async", mode="low_latency") for comm in comms]


# -- bits --------------------------------------------------------------------------------------------------------------


def exchange_over(group, grid, transport):
    with open_communicator(group, topology=grid, algorithm="hierarchical", transport=transport, **SIZES) as comm:
        holders = comm._exchanger.session.algorithms["low_latency"].tools.holders
        for seed in range(9):  # every window has been used
            check_exchange(comm, seed, ("slab", "expert_major")[seed % 2])
        return holders.over_rails, len(holders.far)


@pytest.mark.parametrize("backend", ["stepped", "threads", "processes"])
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: str(grid.domain_of))
def test_any_grid(grid, backend):
    if backend == "processes" and grid.num_ranks > 4:
        pytest.skip("two ranks more would only wait for a core")
    told = launch(exchange_over, grid.num_ranks, grid, "auto", backend=backend)
    assert told == [(True, grid.num_domains - 1)] * grid.num_ranks


@pytest.mark.parametrize("num_ranks", [3, 4, 5])
def test_domains_that_only_their_ranks_can_address(num_ranks):
    told = launch(exchange_over, num_ranks, None, "pairs-local", backend="threads")
    assert told == [(True, (num_ranks + 1) // 2 - 1)] * num_ranks


@pytest.mark.parametrize("algorithm", ["hierarchical", "auto", "direct"])
@pytest.mark.parametrize(("transport", "topology"), [("local", Topology.grid(3, 2)), ("pairs-local", None)])
def test_modes_and_calls_in_any_order(transport, topology, algorithm):
    num_ranks = 4 if topology is None else topology.num_ranks
    options = {"transport": transport, "topology": topology, "algorithm": algorithm, "max_in_flight": 3}
    with in_one_thread(num_ranks, **options, **SIZES) as comms:
        earlier = Batch(num_ranks, 5)
        received = receive_all(comms, earlier, mode="low_latency")
        for seed in range(6):
            batches = [Batch(num_ranks, seed + n) for n in range(5)]

            def fast(batch):
                return partial(batch.send, how="dispatch_async", mode="low_latency")

            def slow(batch):
                return partial(batch.send, how="dispatch_async")

            def home(comm):
                return comm.combine_async(received[comm.rank].x, received[comm.rank].handle)

            one, two, three, four, five = batches
            calls = [fast(one), fast(two), home, slow(three), fast(four), home, slow(five)]
            works = run_at_random(comms, calls, random.Random(seed))
            for rank, own in enumerate(works):
                results = [work.wait() for work in own]
                for batch, place in ((one, 0), (two, 1), (four, 4)):
                    check_received(results[place], batch, rank)
                for batch, place in ((three, 3), (five, 6)):
                    batch.check_received(results[place], rank)
                for place in (2, 5):
                    earlier.check_home(results[place], rank)


def gradients(group, algorithm, results):
    with open_communicator(group, transport="pairs-local", algorithm=algorithm, **SIZES) as comm:
        batch = Batch(group.size, 1)
        x = batch.x(comm.rank).requires_grad_()
        weights = batch.topk_weights(comm.rank).requires_grad_()
        received = comm.dispatch(x, batch.topk_idx(comm.rank), mode="low_latency")
        out = comm.combine(received.x * received.x, received.handle, weights)
        (out * (comm.rank + 1)).sum().backward()
        results[algorithm, comm.rank] = out.detach(), x.grad, weights.grad


def test_gradients_are_those_from_rank_to_rank():
    results = {}
    for algorithm in ("hierarchical", "direct"):
        launch(gradients, 4, algorithm, results, backend="threads")
    for rank in range(4):
        for got, want in zip(results["hierarchical", rank], results["direct", rank], strict=True):
            assert_bitwise_equal(got, want, f"rank {rank}")
        assert Batch(4, 1).num_tokens(rank) == 0 or results["hierarchical", rank][1].any()


# -- bytes -------------------------------------------------------------------------------------------------------------


def count_bytes(group, transport, topology, algorithm):
    options = {"transport": transport, "topology": topology, "algorithm": algorithm}
    with open_communicator(group, **options, **SIZES, num_experts=8, num_topk=4) as comm:
        tokens = 6 if comm.rank == 0 else 0
        # Experts of ranks 2 and 3, of both, of 0 alone, of none.
        ids = torch.tensor([[4, 6, 7, 5], [4, 5, 4, -1], [6, 0, -1, 1], [0, 1, 2, 3], [-1] * 4, [7, 4, 0, 2]])[:tokens]
        comm.dispatch(torch.ones(tokens, HIDDEN), ids.reshape(-1, 4), mode="low_latency")
        return comm.stats["bytes_between_hosts"], comm.explain()


@pytest.mark.parametrize(("transport", "topology"), [("pairs-local", None), ("local", Topology.grid(2, 2))])
def test_a_row_crosses_once_per_domain(transport, topology):
    row, head = 4 * HIDDEN, 128  # ids of 6 tokens, rounded up to lines
    found = {
        algorithm: launch(count_bytes, 4, transport, topology, algorithm, backend="threads")
        for algorithm in ("hierarchical", "auto", "direct")
    }
    assert [sent for sent, _ in found["hierarchical"]] == [head + 4 * row, 0, 0, 0]
    assert [sent for sent, _ in found["auto"]] == [head + 4 * row, 0, 0, 0]
    assert [sent for sent, _ in found["direct"]] == [2 * head + (3 + 3) * row, 0, 0, 0]
    # 4 of 8 experts, 4 of them far: 1 - 1/70 of all choices have one there; each rank there has 2: 1 - 15/70.
    assert (
        "dispatch over rails: a token of evenly chosen experts crosses 0.986 times; from rank to rank 1.57 times"
        in found["auto"][0][1]
    )
    assert "dispatch from rank to rank: a token of evenly chosen experts crosses 1.57 times" in found["direct"][0][1]


def test_domains_of_one_rank_know_no_rails():
    for _, text in launch(count_bytes, 2, "far-local", None, "hierarchical", backend="threads"):
        assert "domains are single ranks: a token of evenly chosen experts crosses 0.986 times" in text


# -- late --------------------------------------------------------------------------------------------------------------


def test_a_rank_waits_for_what_its_neighbour_holds():
    """Rank 3 has everybody's card, but rank 0's message for it is on its way to rank 2 still."""
    with in_one_thread(4, transport="held-local", **SIZES) as comms:
        for seed in range(6):
            batch = Batch(4, seed)
            with holding(0, 2) as let_go:
                works = send_all(comms, batch)
                assert comms[3]._exchanger.session.transport.lane(0, 0) == seed + 1
                done = [work.done() for work in works]
                assert done == [True, True, False, False]
                let_go()
                run_in_turns(works)
            for rank, work in enumerate(works):
                check_received(work.wait(), batch, rank)


def test_from_rank_to_rank_nobody_waits_for_a_neighbours_messages():
    with in_one_thread(4, transport="held-local", algorithm="direct", **SIZES) as comms, holding(0, 2) as let_go:
        works = send_all(comms, Batch(4, 2))
        assert [work.done() for work in works] == [True, True, False, True]
        let_go()
        run_in_turns(works)


def test_what_does_not_come_to_a_neighbour_is_named_in_time():
    with in_one_thread(4, transport="held-local", timeout=timedelta(seconds=0.2), **SIZES) as comms:
        with holding(0, 2) as let_go:
            works = send_all(comms, Batch(4, 2))
            kind, text, peers = caught(works[3].wait)
            assert (kind, peers) == ("PeerTimeout", (0, 2)), text
            assert "rank 3 waited 0.2 s for what rank 0 (pid " in text
            assert "sent to rank 2 (pid " in text
            kind, text, peers = caught(works[2].wait)
            assert (kind, peers) == ("PeerTimeout", (0,)), text
            let_go()
        for work in works[:2]:
            assert caught(work.wait)[0] in ("PeerFailed", "nothing")
        for seed in range(6):
            batch = Batch(4, seed)
            works = send_all(comms, batch)
            run_in_turns(works)
            for rank, work in enumerate(works):
                check_received(work.wait(), batch, rank)


def test_a_neighbour_that_leaves_with_a_message_is_named():
    with in_one_thread(4, transport="held-local", **SIZES) as comms, holding(0, 2):
        works = send_all(comms, Batch(4, 2))
        comms[2]._exchanger.session.transport.board.depart()  # as a process that ends, without a word
        kind, text, peers = caught(works[3].wait)
        assert (kind, peers) == ("PeerLost", (2,)), text


def test_a_neighbour_that_gives_up_is_named():
    with in_one_thread(4, transport="held-local", **SIZES) as comms, holding(0, 2):
        works = send_all(comms, Batch(4, 2))
        comms[2].close()
        kind, text, peers = caught(works[3].wait)
        assert (kind, peers) == ("PeerFailed", (2,)), text
        assert "was in flight when the communicator was closed" in text


# -- refused -----------------------------------------------------------------------------------------------------------


def refuse(group, odd, transport):
    """One rank refuses calls, between others that are right."""
    grid = Topology.grid(2, 2) if transport == "auto" else None
    with open_communicator(group, transport=transport, topology=grid, max_in_flight=2, **SIZES) as comm:
        seen = []
        for seed in range(8):
            check_exchange(comm, seed)
            count = 9 if comm.rank == odd else 3
            arguments = torch.ones(count, HIDDEN), torch.full((count, 2), EXPERTS - 1 - seed % EXPERTS)
            seen.append(caught(lambda arguments=arguments: comm.dispatch(*arguments, mode="low_latency"))[::2])
        return seen


@pytest.mark.parametrize("odd", range(4))
@pytest.mark.parametrize(("backend", "transport"), [("threads", "pairs-local"), ("stepped", "auto")])
def test_a_refusal_is_told_and_what_follows_is_right(backend, transport, odd):
    for rank, seen in enumerate(launch(refuse, 4, odd, transport, backend=backend)):
        assert set(seen) == ({("ValueError", ())} if rank == odd else {("PeerFailed", (odd,))})


def disagree(group, odd):
    """One rank makes another call than the others, whose cards came in front of messages."""
    with open_communicator(group, transport="pairs-local", **SIZES) as comm:
        batch = Batch(group.size, 2)
        received = batch.send(comm, mode="low_latency")
        seen = []
        for seed in range(6):
            if comm.rank == odd:
                call = partial(comm.combine, received.x, received.handle)
            else:
                call = partial(Batch(group.size, seed).send, comm, mode="low_latency")
            seen.append(caught(call)[:2])
        for seed in range(6):
            check_exchange(comm, seed)
        return seen


@pytest.mark.parametrize("odd", [0, 3])
def test_another_call_on_one_rank_is_named_with_both(odd):
    for seen in launch(disagree, 4, odd, backend="threads"):
        for kind, text in seen:
            assert kind == "CallMismatch"
            assert "low-latency dispatch(" in text
            assert "low-latency combine(" in text


class LeavingTransport:
    """What is awaited comes to its holder just after that was seen to have left, which does not undo it."""

    def wait_at(self, slot, lanes, at_least, timeout):
        return WaitOutcome.LOST

    def lane_at(self, slot, holder, source):
        return 1


def test_what_has_come_to_a_holder_who_then_left_is_not_lost():
    with in_one_thread(1) as (comm,):
        work = Batch(1, 0).send(comm, "dispatch_async")
        call = comm._exchanger.session.sequencer.in_flight[0]
        HolderLanes(LeavingTransport(), [(1, 2)]).wait(call, 0, 5.0, lambda call: None)
        work.wait()
