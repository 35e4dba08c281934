"""Low-latency mode with ranks that are late, held up in the middle of a call, or dead: a deadline, names, and no damage
to any call that did not fail.
"""

import os
import signal
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
from exchange_ranks import HIDDEN, Batch, caught, left_behind, open_communicator
from low_latency_ranks import check_exchange, check_exchange_patiently, check_received, rows_in_order

from moecomm.kernels import kernels_for
from moecomm.kernels.registry import eager_kernels_for
from moecomm.testing import RankDied, launch

BACKENDS = ["threads", "stepped", "processes"]
VICTIM = 1


# -- late --------------------------------------------------------------------------------------------------------------


def come_late(group, num_late):
    """Rank 1 makes its calls only when rank 0 has given up on `num_late` of them."""
    with open_communicator(group, max_tokens_per_rank=8, timeout=timedelta(seconds=0.2)) as comm:
        check_exchange_patiently(comm, 1)
        if group.rank == VICTIM:
            group.all_gather(None)
        seen = []
        for _ in range(num_late):
            start = time.monotonic()
            seen.append(
                (*caught(lambda: Batch(group.size, 2).send(comm, mode="low_latency")), time.monotonic() - start)
            )
        if group.rank != VICTIM:
            group.all_gather(None)
        group.all_gather(None)
        for seed in range(2 * num_late):
            check_exchange_patiently(comm, seed)
        return seen


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_comes_late_is_named_in_time_and_later_calls_are_right(backend):
    num_late = 7  # more than there are windows
    waited, late = launch(come_late, 2, num_late, backend=backend)
    for number, (kind, text, peers, elapsed) in enumerate(waited, start=3):
        assert (kind, peers) == ("PeerTimeout", (VICTIM,)), text
        assert text.startswith(f"low-latency dispatch #{number}, phase "), text
        assert "rank 0 waited 0.2 s for rank 1 (pid " in text
        assert "has not made the call: counter at 3, expected " in text
        assert "its process lives" in text
        assert elapsed < 10
    for number, (kind, text, peers, _) in enumerate(late, start=3):
        assert (kind, peers) == ("PeerFailed", (0,)), text
        assert text.startswith(f"low-latency dispatch #{number}: rank 0 (pid "), text
        assert "gave up: PeerTimeout" in text or "overwritten" in text


def be_slow(group):
    """Rank 1 is late again and again, but never too late."""
    with open_communicator(group, max_tokens_per_rank=8) as comm:
        for seed in range(12):
            if group.rank == VICTIM:
                time.sleep(0.01 * (seed % 3))
            check_exchange(comm, seed, ("slab", "expert_major")[seed % 2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slow_rank_changes_nothing(backend):
    launch(be_slow, 3, backend=backend)


# -- held up in the middle ---------------------------------------------------------------------------------------------


def be_held_up(group, operation, depth, going_on):
    """Rank 1 stops when it is about to read what has arrived; rank 0 loses patience with later calls and makes many,
    but must not write to what rank 1 has yet to read. Returns how each call ended, and what the calls gave.
    """
    options = {"max_tokens_per_rank": 8, "max_in_flight": depth, "timeout": timedelta(seconds=0.1)}
    with open_communicator(group, **options) as comm:
        batch = Batch(group.size, 2)
        for seed in range(2 * depth):
            check_exchange_patiently(comm, seed)
        handle = batch.send(comm, mode="low_latency").handle

        def dispatch(number):
            received = comm.dispatch(batch.x(comm.rank) + number, batch.topk_idx(comm.rank), mode="low_latency")
            return rows_in_order(received, received.x)

        def combine(number):
            # Rows elsewhere: they are copied to memory that is used again and again.
            return comm.combine(torch.full((comm.num_local_experts, 16, HIDDEN), number + 1.0), handle)

        call = {"dispatch": dispatch, "combine": combine}[operation]
        endings, given = [], []
        group.all_gather(None)
        if group.rank == VICTIM:
            going_on.clear()
        group.all_gather(None)
        for number in range(2 * depth + 3):
            endings.append(caught(lambda number=number: given.append(call(number)))[0])
        going_on.set()
        group.all_gather(None)
        for seed in range(4 * depth):
            check_exchange_patiently(comm, seed)
        return endings, given


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_what_a_rank_still_reads_is_not_overwritten_by_one_that_lost_patience(operation, depth, monkeypatch):
    going_on = threading.Event()
    going_on.set()
    kernels, reads = {
        "dispatch": (eager_kernels_for("cpu"), "receive_eager"),
        "combine": (kernels_for("cpu"), "combine_rows"),
    }[operation]
    real = getattr(kernels, reads)

    def read(*arguments, **options):
        if threading.current_thread().name == f"rank {VICTIM}":
            assert going_on.wait(20)
        return real(*arguments, **options)

    monkeypatch.setattr(kernels, reads, read, raising=False)
    (patience, _), (held_up, given) = launch(be_held_up, 2, operation, depth, going_on)
    assert patience == ["nothing"] + ["PeerTimeout"] * (2 * depth + 2)
    # What had arrived is right, however late it is read.
    assert held_up == ["nothing"] + ["PeerFailed"] * (2 * depth + 2)
    batch = Batch(2, 2)
    wanted = batch.received(VICTIM).x if operation == "dispatch" else torch.full_like(batch.x(VICTIM), 2.0)
    assert torch.equal(given[0], wanted)


# -- dead --------------------------------------------------------------------------------------------------------------


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_middle(kernels, name):
    """The kernel does half of its work, on half of the windows or tokens; then the process ends."""
    real = getattr(kernels, name)

    def half(*arguments, **options):
        *others, last = arguments
        if name == "send_eager":
            scratch = torch.empty(1 << 16, dtype=torch.uint8)
            real(*others, [last[0]] + [scratch.data_ptr()] * (len(last) - 1))
        elif name == "combine_rows":
            out, routes, addresses = arguments
            tokens = (routes.shape[0] + 1) // 2
            real(out[:tokens], routes[:tokens], addresses, **options)
        die()

    setattr(kernels, name, half)


def victim(comm, batch, phase):
    """Runs until just after `phase` and ends there."""
    operation, _, when = phase.partition(": ")
    dispatch = partial(batch.send, comm, "dispatch_async", mode="low_latency")
    if operation == "combine":
        received = dispatch().wait()
        dispatch = partial(comm.combine_async, received.x * 2, received.handle)
    if when == "before":
        die()
    if when.startswith("in "):
        name = when.removeprefix("in ")
        die_in_the_middle(kernels_for("cpu") if name == "combine_rows" else eager_kernels_for("cpu"), name)
    work = dispatch()
    if when != "sent":
        work.wait()
    die()


def survivor(comm, batch):
    """A dispatch and a combine; returns how the first of them that failed did."""
    given = []
    error = caught(lambda: given.append(batch.send(comm, mode="low_latency")))
    if error[0] != "nothing":
        return error
    check_received(given[0], batch, comm.rank)
    error = caught(lambda: given.append(comm.combine(given[0].x * 2, given[0].handle)))
    if error[0] == "nothing":
        assert torch.equal(given[1], 2 * batch.home(comm.rank)), "what a dead rank had sent"
    return error


def kill_in(group, phase):
    comm = open_communicator(group, max_tokens_per_rank=8, timeout=timedelta(seconds=60))
    batch = Batch(group.size, 2)
    for seed in range(3):
        check_exchange(comm, seed)
    if group.rank == VICTIM:
        victim(comm, batch, phase)
    start = time.monotonic()
    error = survivor(comm, batch)
    elapsed = time.monotonic() - start
    modes = ("low_latency", "throughput", "low_latency")
    again = [caught(partial(batch.send, comm, mode=mode))[0] for mode in modes]
    comm.close()
    comm = None
    return error, elapsed, again, left_behind()


# After nine calls: where the others notice, and what they say of the rank that died.
PHASES = {
    "dispatch: before": ("low-latency dispatch #9", "had made 9 calls, not yet #9"),
    "dispatch: in send_eager": ("low-latency dispatch #9", "had made 9 calls, not yet #9"),
    "dispatch: sent": ("low-latency combine #10", "had made 10 calls, not yet #10"),
    "dispatch: in receive_eager": ("low-latency combine #10", "had made 10 calls, not yet #10"),
    "dispatch: done": ("low-latency combine #10", "had made 10 calls, not yet #10"),
    "combine: before": ("low-latency combine #10", "had made 10 calls, not yet #10"),
    "combine: sent": None,
    "combine: in combine_rows": None,
    "combine: done": None,
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_rank_is_named_with_what_it_was_doing(phase):
    results = launch(kill_in, 3, phase, backend="processes", return_exceptions=True)
    assert isinstance(results[VICTIM], RankDied)
    for rank in (0, 2):
        assert not isinstance(results[rank], BaseException), results[rank]
        (kind, text, peers), elapsed, again, left = results[rank]
        if PHASES[phase] is None:
            assert kind == "nothing", text
        else:
            operation, doing = PHASES[phase]
            assert (kind, peers) == ("PeerLost", (VICTIM,)), text
            assert text.startswith(f"{operation}: lost rank {VICTIM} (pid "), text
            assert doing in text
        assert elapsed < 10, f"noticed after {elapsed:.1f} s"
        assert again == ["PeerLost"] * 3
        assert left == []
