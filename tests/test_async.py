"""Calls in flight: waited for in any order, polled, stepped through every interleaving of two ranks' phases, refused
beside each other, and differentiated.
"""

import dataclasses
import random
from functools import partial

import pytest
import torch
from exchange_ranks import Batch, caught, check_exchange, in_one_thread, open_communicator
from interleavings import Scenario, begin, explore, receive_all, run_at_random, run_in_turns

from moecomm import TooManyInFlight
from moecomm.testing import launch

BACKENDS = ["threads", "stepped", "processes"]
SEEDS = (2, 3)  # of batches: in the first rank 1 has tokens, in the second rank 0 has


# -- ranks that wait in different orders -------------------------------------------------------------------------------


def wait_in_some_order(group, orders):
    """Begins four dispatches, then four combines, and waits for them in this rank's order."""
    order = orders[group.rank % len(orders)]
    batches = [Batch(group.size, seed) for seed in range(len(order))]
    with open_communicator(group, max_in_flight=len(order)) as comm:
        for _ in range(3):
            works = [batch.send(comm, "dispatch_async") for batch in batches]
            received = {index: works[index].wait() for index in order}
            for index, batch in enumerate(batches):
                batch.check_received(received[index], comm.rank)
                assert works[index].wait() is received[index]
            works = [comm.combine_async(received[index].x, received[index].handle) for index in range(len(order))]
            home = {index: works[index].wait() for index in reversed(order)}
            for index, batch in enumerate(batches):
                batch.check_home(home[index], comm.rank)
                received[index].x.fill_(float("nan"))
            # A call that does not wait finishes what was begun before it, as far as it must.
            works = [batch.send(comm, "dispatch_async") for batch in batches]
            check_exchange(comm, 7)
            for batch, work in zip(batches, works, strict=True):
                batch.check_received(work.wait(), comm.rank)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_may_wait_in_different_orders(backend, num_ranks):
    launch(wait_in_some_order, num_ranks, [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)], backend=backend)


def poll_until_done(group):
    batches = [Batch(group.size, seed) for seed in SEEDS]
    with open_communicator(group) as comm:
        works = [batch.send(comm, "dispatch_async") for batch in batches]
        polls = 0
        while not works[1].done():
            polls += 1
            assert polls < 10_000_000
        assert works[0].done(), "calls finish in their order"
        for batch, work in zip(batches, works, strict=True):
            batch.check_received(work.wait(), comm.rank)
        alone = Batch(group.size, 1).send(comm, "dispatch_async")
        group.all_gather(None)
        late = Batch(group.size, 1)
        late.check_received(alone.wait(), comm.rank)


@pytest.mark.parametrize("backend", BACKENDS)
def test_polling_carries_calls_to_their_end(backend):
    launch(poll_until_done, 3, backend=backend)


def backward_of_two(group):
    """Two layers' worth of calls in flight, with gradients; against the same without overlap."""
    results = []
    for overlapped in (False, True):
        with open_communicator(group, max_in_flight=4) as comm:
            leaves = [Batch(group.size, seed).x(comm.rank).double().requires_grad_() for seed in SEEDS]
            weights = [Batch(group.size, seed).topk_weights(comm.rank).double().requires_grad_() for seed in SEEDS]
            idx = [Batch(group.size, seed).topk_idx(comm.rank) for seed in SEEDS]
            if overlapped:
                works = [comm.dispatch_async(*inputs) for inputs in zip(leaves, idx, weights, strict=True)]
                received = [works[1].wait(), works[0].wait()][::-1]
                ys = [(one.x * one.topk_weights[:, None]).sin() for one in received]
                works = [comm.combine_async(y, one.handle, w) for y, one, w in zip(ys, received, weights, strict=True)]
                outs = [work.wait() for work in works]
            else:
                received = [comm.dispatch(*inputs) for inputs in zip(leaves, idx, weights, strict=True)]
                ys = [(one.x * one.topk_weights[:, None]).sin() for one in received]
                outs = [comm.combine(y, one.handle, w) for y, one, w in zip(ys, received, weights, strict=True)]
            (outs[0].pow(2).sum() + outs[1].sum()).backward()
            results.append([*outs, *(leaf.grad for leaf in (*leaves, *weights))])
    for plain, overlapped in zip(*results, strict=True):
        assert torch.equal(plain, overlapped)
    assert all(bool(grad.abs().sum() > 0) or grad.numel() == 0 for grad in results[0][2:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_without_overlap(backend):
    launch(backward_of_two, 3, backend=backend)


# -- every interleaving ------------------------------------------------------------------------------------------------


def poisoned(received):
    received.x.fill_(float("nan"))


def check_dispatch(works, index, seed):
    batch = Batch(len(works), seed)
    for rank, own in enumerate(works):
        received = own[index].wait()
        batch.check_received(received, rank)
        poisoned(received)


def check_combine(works, index, seed):
    batch = Batch(len(works), seed)
    for rank, own in enumerate(works):
        batch.check_home(own[index].wait(), rank)


def operation(name, comms, seed):
    """(per rank the call, the check of its results) of one operation."""
    batch = Batch(len(comms), seed)
    if name == "dispatch":
        inputs = [(batch.x(rank), batch.topk_idx(rank)) for rank in range(len(comms))]
        return [partial(comm.dispatch_async, *own) for comm, own in zip(comms, inputs, strict=True)], check_dispatch
    received = receive_all(comms, batch)
    if name == "cached":
        calls = [
            partial(comm.dispatch_async, batch.x(comm.rank), handle=one.handle)
            for comm, one in zip(comms, received, strict=True)
        ]
        return calls, check_dispatch
    calls = [partial(comm.combine_async, one.x.clone(), one.handle) for comm, one in zip(comms, received, strict=True)]
    return calls, check_combine


PAIRS = [("dispatch", "dispatch"), ("dispatch", "combine"), ("combine", "dispatch"), ("cached", "dispatch")]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_two_calls_in_flight_are_right_in_every_interleaving(pair):
    with in_one_thread(2) as comms:
        parts = [operation(name, comms, seed) for name, seed in zip(pair, SEEDS, strict=True)]
        calls = [[part[0][rank] for part in parts] for rank in range(2)]

        def check(works):
            for index, (seed, (_, check_one)) in enumerate(zip(SEEDS, parts, strict=True)):
                check_one(works, index, seed)

        count = explore(Scenario(comms, calls, check).run)
        assert count > 100, count
        assert [comm.stats["receive_blocks_alive"] for comm in comms] == [0, 0]


def test_one_call_of_three_ranks_is_right_in_every_interleaving():
    with in_one_thread(3) as comms:
        calls, check = operation("dispatch", comms, 2)
        scenario = Scenario(comms, [[call] for call in calls], lambda works: check(works, 0, 2))
        assert explore(scenario.run) > 100


@pytest.mark.parametrize("refused", [0, 1])
def test_a_refusal_beside_a_call_in_flight_is_right_in_every_interleaving(refused):
    """Rank 1 refuses the first or the second of two calls; the other one must not notice."""
    with in_one_thread(2) as comms:
        calls = [[partial(Batch(2, seed).send, comm, "dispatch_async") for seed in SEEDS] for comm in comms]
        bad = torch.full((1, 2), 99)
        calls[1][refused] = lambda: comms[1].dispatch_async(torch.zeros(1, comms[1].hidden), bad)

        def check(works):
            assert "99" in works[1][refused]
            kind, text, _ = caught(works[0][refused].wait)
            assert kind == "PeerFailed", text
            assert "gave up: ValueError" in text
            assert "99" in text
            check_dispatch([[own[1 - refused]] for own in works], 0, SEEDS[1 - refused])

        assert explore(Scenario(comms, calls, check).run) > 50
        assert [comm.stats["receive_blocks_alive"] for comm in comms] == [0, 0]


@pytest.mark.parametrize("kernel", ["push_rows", "plan_expert_major"])
def test_a_failure_in_the_middle_is_right_in_every_interleaving(kernel, monkeypatch):
    """Rank 1 fails in the middle of the first of two calls; the second one must not notice."""
    with in_one_thread(2) as comms:
        kernels = comms[1]._exchanger.session.kernels
        real, first = getattr(kernels, kernel), []

        def fail_once(*arguments, **options):
            if comms[1]._exchanger.session.sequencer._outstanding[0].sequence in first and running == [1]:
                first.clear()
                raise RuntimeError("out of order")
            return real(*arguments, **options)

        running = []
        monkeypatch.setattr(kernels, kernel, fail_once)
        sequencer = comms[1]._exchanger.session.sequencer
        run_phase = sequencer._run_phase

        def run_phase_of_rank_1(call):
            running.append(1)
            run_phase(call)
            running.clear()

        monkeypatch.setattr(sequencer, "_run_phase", run_phase_of_rank_1)
        calls = [[partial(Batch(2, seed).send, comm, "dispatch_async") for seed in SEEDS] for comm in comms]

        def run(choose):
            first[:] = [sequencer._next_sequence]
            scenario.run(choose)

        def check(works):
            assert caught(works[1][0].wait)[:2] == ("RuntimeError", "out of order")
            kind, text, _ = caught(works[0][0].wait)
            assert kind == "PeerFailed", text
            assert "RuntimeError: out of order" in text
            check_dispatch(works, 1, SEEDS[1])

        scenario = Scenario(comms, calls, check)
        assert explore(run) > 100
        assert [comm.stats["receive_blocks_alive"] for comm in comms] == [0, 0]


@dataclasses.dataclass(frozen=True)
class Random:
    """A call of any kind, refused by some ranks."""

    kind: str
    batch: Batch
    refused_by: tuple
    mistake: str

    OPTIONS = {  # noqa: RUF012 - not a field
        "expert_major": {},
        "flat": {"layout": "flat"},
        "low_latency": {"mode": "low_latency", "layout": "expert_major"},
    }

    def __call__(self, comm):
        x, idx = self.batch.x(comm.rank), self.batch.topk_idx(comm.rank)
        if comm.rank in self.refused_by:
            x = torch.zeros(1, comm.hidden + (self.mistake == "hidden"))
            idx = torch.full((1, 2), 99 if self.mistake == "99" else 0)
        return begin(partial(comm.dispatch_async, x, idx, **self.OPTIONS[self.kind]))

    def check(self, rank, work):
        if rank in self.refused_by:
            assert self.mistake in work
            return
        if self.refused_by:
            kind, text, peers = caught(work.wait)
            assert (kind, set(peers) <= set(self.refused_by)) == ("PeerFailed", True), text
            assert self.mistake in text
            return
        received = work.wait()
        if self.kind == "low_latency":
            expected = self.batch.received(rank).x
            assert torch.equal(received.x[: expected.shape[0]], expected)
            assert not received.x[expected.shape[0] :].any()
        else:
            self.batch.check_received(received, rank, layout=self.kind)
        poisoned(received)


@pytest.mark.parametrize("seed", range(24))
def test_calls_of_any_kind_and_refusals_are_right_in_any_order(seed):
    numbers = random.Random(seed)
    num_ranks, max_in_flight = 2 + seed % 3, 1 + seed % 4
    calls = [
        Random(
            numbers.choice(list(Random.OPTIONS)),
            Batch(num_ranks, numbers.randrange(4)),
            tuple(rank for rank in range(num_ranks) if numbers.random() < 0.15),
            numbers.choice(["99", "hidden"]),
        )
        for _ in range(24)
    ]
    with in_one_thread(num_ranks, max_in_flight=max_in_flight, max_tokens_per_rank=8) as comms:
        begun = run_at_random(comms, calls, numbers)
        for rank, own in enumerate(begun):
            for call in calls:
                call.check(rank, own.pop(0))
        assert {comm.stats["receive_blocks_alive"] for comm in comms} == {0}


# -- refusals beside calls in flight -----------------------------------------------------------------------------------


def test_too_many_in_flight_says_how_many_and_disturbs_nothing():
    with in_one_thread(2) as comms:
        first, second = (Batch(2, seed) for seed in (1, 2))
        works = [(first.send(comm, "dispatch_async"), second.send(comm, "dispatch_async")) for comm in comms]
        for comm in comms:
            with pytest.raises(TooManyInFlight) as refused:
                first.send(comm, "dispatch_async")
            text = str(refused.value)
            assert text.startswith("dispatch #2: 2 calls have begun since dispatch #0, which is in flight"), text
            assert "(all that are: dispatch #0, dispatch #1), and max_in_flight is 2; first call wait() on" in text
            assert text.endswith("what dispatch #0 gave, or construct the Communicator with a larger max_in_flight")
        run_in_turns([work for pair in works for work in pair])
        for comm, (one, two) in zip(comms, works, strict=True):
            first.check_received(one.wait(), comm.rank)
            second.check_received(two.wait(), comm.rank)


def test_a_peer_that_refuses_call_after_call_does_not_spoil_one_that_is_in_flight():
    """Rank 0 has finished its call and refuses many more; rank 1 has yet to look whether its rows have arrived."""
    with in_one_thread(2) as comms:
        batch = Batch(2, 3)
        works = [batch.send(comm, "dispatch_async") for comm in comms]
        for _ in range(2):
            for work in works:
                work.step()
        batch.check_received(works[0].wait(), 0)
        bad = torch.full((1, 2), 99)
        for _ in range(50):
            with pytest.raises(ValueError, match="99"):
                comms[0].dispatch(torch.zeros(1, comms[0].hidden), bad)
        batch.check_received(works[1].wait(), 1)
        for number in range(50):
            kind, text, _ = caught(lambda: batch.send(comms[1]))
            assert kind == "PeerFailed", text
            assert text.startswith(f"dispatch #{number + 1}: rank 0")
        works = [batch.send(comm, "dispatch_async") for comm in comms]
        run_in_turns(works)
        for rank, work in enumerate(works):
            batch.check_received(work.wait(), rank)


def test_refused_calls_count_as_in_flight_until_their_elders_are_done():
    """As they do for the peers: so all ranks agree whether one more may begin, and no message is overwritten."""
    with in_one_thread(2) as comms:
        batch = Batch(2, 3)
        works = [batch.send(comm, "dispatch_async") for comm in comms]
        wrong = torch.zeros(1, 3), torch.zeros(1, 2, dtype=torch.int64)
        for calls in range(1, 4):
            with pytest.raises(ValueError if calls == 1 else TooManyInFlight):
                comms[0].dispatch_async(*wrong)
        in_vain = batch.send(comms[1], "dispatch_async")
        for comm in comms:
            with pytest.raises(TooManyInFlight, match=r"#2: 2 calls have begun since dispatch #0, which is in flight"):
                batch.send(comm, "dispatch_async")
        run_in_turns([*works, in_vain])
        for rank, work in enumerate(works):
            batch.check_received(work.wait(), rank)
        assert caught(in_vain.wait)[0] == "PeerFailed"
        works = [batch.send(comm, "dispatch_async") for comm in comms]
        run_in_turns(works)
        for rank, work in enumerate(works):
            batch.check_received(work.wait(), rank)


def test_an_error_is_the_same_each_time_it_is_waited_for():
    with in_one_thread(2) as comms:
        batch = Batch(2, 1)
        for requires_grad in (False, True):
            x = batch.x(0).requires_grad_(requires_grad)
            work = comms[0].dispatch_async(x, batch.topk_idx(0))
            with pytest.raises(ValueError, match="99"):
                comms[1].dispatch(torch.zeros(1, comms[1].hidden), torch.full((1, 2), 99))
            first, second = caught(work.wait), caught(work.wait)
            assert first[0] == "PeerFailed"
            assert "99" in first[1]
            assert first == second
            assert work.done()


def test_closing_with_calls_in_flight_ends_them_here_and_there():
    with in_one_thread(2) as comms:
        batch = Batch(2, 1)
        works = [batch.send(comm, "dispatch_async") for comm in comms]
        comms[0].close()
        assert caught(works[0].wait)[:2] == (
            "CommunicatorClosed",
            "dispatch #0 was in flight when the communicator was closed",
        )
        kind, text, peers = caught(works[1].wait)
        assert (kind, peers) == ("PeerFailed", (0,))
        assert "closed" in text
        assert caught(lambda: batch.send(comms[1]))[0] == "PeerLost"
