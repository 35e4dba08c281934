"""What happens when a rank dies, leaves, stays away, is late or is interrupted: a named error on every other rank, in
time, nothing left behind, and ranks that are in step again where all of them live on.
"""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from exchange_ranks import Batch, caught, check_exchange, in_one_thread, left_behind, open_communicator
from interleavings import receive_all, run_in_turns

from moecomm.testing import RankDied, launch

BACKENDS = ["threads", "stepped", "processes"]
VICTIM = 1


# -- a rank dies -------------------------------------------------------------------------------------------------------


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(kernel):
    """A kernel that does its work on the first half of the tokens and then ends the process."""

    def half(*arguments, **options):
        first, routes, *rest = arguments
        tokens = (routes.shape[0] + 1) // 2
        kernel(first[:tokens], routes[:tokens], *rest, **options)
        die()

    return half


def forward(comm, batch, *, requires_grad=False):
    x = batch.x(comm.rank).requires_grad_(requires_grad)
    received = comm.dispatch(x, batch.topk_idx(comm.rank))
    return received, comm.combine(received.x * 2, received.handle)


def victim_of(phase, comm, batch):
    """Runs until just after `phase` and ends there."""
    kernels = comm._exchanger.session.kernels
    operation, _, when = phase.partition(": ")
    if operation == "backward":
        _, out = forward(comm, batch, requires_grad=True)
        if when == "mid pull":
            kernels.combine_rows = die_after(kernels.combine_rows)
        if when != "before":
            out.sum().backward()
        die()
    if operation == "dispatch":
        begin = lambda: batch.send(comm, "dispatch_async")  # noqa: E731
    else:
        received = batch.send(comm)
        y = received.x * 2
        begin = {
            "combine": lambda: comm.combine_async(y, received.handle),
            "cached dispatch": lambda: comm.dispatch_async(batch.x(comm.rank), handle=received.handle),
        }[operation]
    if when == "before":
        die()
    if when == "mid push":
        kernels.push_rows = die_after(kernels.push_rows)
    if when == "mid pull":
        kernels.combine_rows = die_after(kernels.combine_rows)
    work = begin()
    last = {"announce": 0, "ready": 0, "grant": 1, "pull": 1, "push": 2}.get(when, 9)
    if operation == "cached dispatch":
        last -= when in ("grant", "push")
    for _ in range(last):
        work.step()
    die()


def survivor_of(phase, comm, batch):
    """The same calls; returns the one that failed and how."""
    operation = phase.partition(": ")[0]
    if operation == "backward":
        _, out = forward(comm, batch, requires_grad=True)
        return caught(lambda: out.sum().backward())
    received = []
    error = caught(lambda: received.append(batch.send(comm)))
    if received and operation == "cached dispatch":
        error = caught(lambda: comm.dispatch(batch.x(comm.rank), handle=received[0].handle))
    if received and error[0] == "nothing":
        error = caught(lambda: comm.combine(received[0].x, received[0].handle))
    return error


def kill_in(group, phase):
    comm = open_communicator(group, timeout=timedelta(seconds=60))
    batch = Batch(group.size, 2)
    check_exchange(comm, 1)
    if group.rank == VICTIM:
        victim_of(phase, comm, batch)
    start = time.monotonic()
    error = survivor_of(phase, comm, batch)
    elapsed = time.monotonic() - start
    again = caught(lambda: batch.send(comm))
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    comm.close()
    comm = None
    return error, elapsed, again, left_behind(), children


PHASES = {
    "dispatch: before": ("dispatch #2", "had made 2 calls, not yet #2"),
    "dispatch: announce": ("dispatch #2", "had begun #2"),
    "dispatch: grant": ("dispatch #2", "had granted receive memory in #2 and was moving rows"),
    "dispatch: mid push": ("dispatch #2", "had granted receive memory in #2 and was moving rows"),
    "dispatch: push": ("combine #3", "had made 3 calls, not yet #3"),
    "combine: before": ("combine #3", "had made 3 calls, not yet #3"),
    "combine: ready": ("combine #3", "had begun #3"),
    "combine: mid pull": ("combine #3", "had begun #3"),
    "cached dispatch: before": ("dispatch (cached) #3", "had made 3 calls, not yet #3"),
    "cached dispatch: grant": ("dispatch (cached) #3", "had begun #3"),
    "cached dispatch: mid push": ("dispatch (cached) #3", "had begun #3"),
    "cached dispatch: push": ("combine #4", "had made 4 calls, not yet #4"),
    "backward: before": ("dispatch (cached) #4", "had made 4 calls, not yet #4"),
    "backward: mid pull": ("combine #5", "had begun #5"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_peer_is_named_with_what_it_was_doing(phase):
    num_ranks = 2 if phase in ("dispatch: mid push", "combine: ready") else 3
    shm_before = sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else []
    results = launch(kill_in, num_ranks, phase, backend="processes", return_exceptions=True)
    assert isinstance(results[VICTIM], RankDied)
    operation, doing = PHASES[phase]
    for rank, result in enumerate(results):
        if rank == VICTIM:
            continue
        (kind, text, peers), elapsed, again, left, children = result
        assert (kind, VICTIM in peers) == ("PeerLost", True), (rank, text)
        assert text.startswith(f"{operation}: lost rank {VICTIM} (pid "), text
        assert doing in text
        assert elapsed < 10, f"rank {rank} noticed after {elapsed:.1f} s"
        assert again[0] == "PeerLost", again
        assert (left, children) == ([], "")
    assert sorted(os.listdir("/dev/shm")) == shm_before if shm_before else True


def leave_in(group, phase, how, kept):
    """Threads cannot be killed, but they can end: by an exception that closes the communicator, or without a word."""
    comm = open_communicator(group, timeout=timedelta(seconds=60))
    kept.append(comm)
    batch = Batch(group.size, 2)
    if group.rank == VICTIM:
        work = batch.send(comm, "dispatch_async") if phase >= 0 else None
        for _ in range(phase):
            work.step()
        if how == "returns":
            return None
        with comm:
            raise RuntimeError("an exception between calls")
    result = survivor_of("dispatch: ", comm, batch)
    comm.close()
    return result


@pytest.mark.parametrize("how", ["returns", "raises"])
@pytest.mark.parametrize("phase", [-1, 0, 1, 2])
@pytest.mark.parametrize("backend", ["threads", "stepped"])
def test_a_thread_that_ends_is_named(backend, phase, how):
    kept = []
    results = launch(leave_in, 3, phase, how, kept, backend=backend, return_exceptions=True)
    for comm in kept:
        comm.close()
    for kind, text, peers in (results[0], results[2]):
        if how == "raises" and phase in (0, 1):
            # It had begun a call; closing gave up on that, and the reason is known.
            assert (kind, peers) == ("PeerFailed", (VICTIM,)), text
            assert "CommunicatorClosed: dispatch #0 was in flight when the communicator was closed" in text
        elif kind == "PeerFailed" and phase == 2:
            assert "CommunicatorClosed" in text  # or it saw all rows arrive before the goodbye, and lost it later
        else:
            # The other survivor may have gone, too, before this one looks.
            assert (kind, VICTIM in peers) == ("PeerLost", True), text
            assert "lost rank 1 (pid " in text
            assert "the process has ended or closed its communicator" in text


# -- a rank stays away, and comes late ---------------------------------------------------------------------------------


def come_late(group, num_late):
    """Rank 1 makes its calls only when rank 0 has given up on `num_late` of them."""
    with open_communicator(group, timeout=timedelta(seconds=0.2)) as comm:
        check_exchange_patiently(comm, 1)
        seen = []
        if group.rank == 1:
            group.all_gather(None)
        for _ in range(num_late):
            call = lambda: Batch(group.size, 2).send(comm)  # noqa: E731
            start = time.monotonic()
            seen.append((*caught(call), time.monotonic() - start))
        if group.rank != 1:
            group.all_gather(None)
        group.all_gather(None)
        for seed in range(3, 3 + num_late + 2):
            check_exchange_patiently(comm, seed)
        alive = comm.stats["receive_blocks_alive"]
        return seen, alive


def check_exchange_patiently(comm, seed):
    """For communicators that soon lose patience: what is to work may take its time on a busy machine."""
    sequencer = comm._exchanger.session.sequencer
    timeout, sequencer.timeout = sequencer.timeout, 20
    check_exchange(comm, seed)
    sequencer.timeout = timeout


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_stays_away_is_named_in_time_and_may_come_late(backend):
    num_late = 7  # more than the messages that are kept
    results = launch(come_late, 2, num_late, backend=backend)
    (waited, alive_0), (late, alive_1) = results
    assert (alive_0, alive_1) == (0, 0)
    for number, (kind, text, peers, elapsed) in enumerate(waited, start=2):
        assert (kind, peers) == ("PeerTimeout", (1,)), text
        # Soon its messages would overwrite some that rank 1 has not read: it has to wait before it may send.
        phase, expected = ("grant", number + 1) if number < 4 else ("announce", number - 1)
        assert text.startswith(f"dispatch #{number}, phase {phase!r}: rank 0 waited 0.2 s for rank 1 (pid "), text
        assert f"has not made the call: counter at 2, expected {expected}, its process lives" in text
        assert "larger timeout" in text
        assert elapsed < 10
    for number, (kind, text, peers, _) in enumerate(late, start=2):
        assert (kind, peers) == ("PeerFailed", (0,)), text
        assert text.startswith(f"dispatch #{number}: rank 0 (pid "), text
        phase = "grant" if number < 4 else "announce"
        assert f"gave up: PeerTimeout: dispatch #{number}, phase {phase!r}" in text or "overwritten" in text


def never_come(group):
    with open_communicator(group, timeout=timedelta(seconds=3)) as comm:
        if group.rank == 2:
            group.all_gather(None)
            return None
        result = caught(lambda: Batch(3, 1).send(comm))
        group.all_gather(None)
        return result


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_rank_that_waits_is_told_who_is_missing(backend):
    results = launch(never_come, 3, backend=backend)
    for kind, text, peers in results[:2]:
        assert kind in ("PeerTimeout", "PeerFailed"), text
        assert peers == (2,), f"{kind}: {text}"
        assert "for rank 2 (pid " in text
        assert "has not made the call: counter at 0, expected 1" in text
    assert "PeerTimeout" in {results[0][0], results[1][0]}


# -- a rank is interrupted, or closes ----------------------------------------------------------------------------------


def be_interrupted(group):
    with open_communicator(group) as comm:
        check_exchange(comm, 1)
        if group.rank == 0:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            try:
                Batch(2, 2).send(comm)
                raise AssertionError("nobody interrupted the wait")
            except KeyboardInterrupt:
                seen = "interrupted"
            group.all_gather(None)
        else:
            group.all_gather(None)
            seen = caught(lambda: Batch(2, 2).send(comm))
        check_exchange(comm, 3)
        return seen, comm.stats["receive_blocks_alive"]


def test_an_interrupt_from_the_keyboard_is_heard_and_told_to_the_peers():
    (first, alive_0), (second, alive_1) = launch(be_interrupted, 2, backend="processes")
    assert first == "interrupted"
    assert second[0] == "PeerFailed"
    assert "rank 0" in second[1]
    assert "gave up: KeyboardInterrupt" in second[1]
    assert (alive_0, alive_1) == (0, 0)


def close_while_others_wait(group):
    comm = open_communicator(group)
    check_exchange(comm, 1)
    seen = None
    if group.rank == 1:
        time.sleep(0.1)  # not needed for the result; the others are asleep by then
        comm.close()
    else:
        seen = caught(lambda: Batch(group.size, 2).send(comm))
    comm.close()
    comm.close()
    return seen, caught(lambda: Batch(group.size, 2).send(comm))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_closes_while_others_wait_is_named(backend):
    results = launch(close_while_others_wait, 3, backend=backend)
    for rank, (seen, after) in enumerate(results):
        assert after[0] == "CommunicatorClosed"
        if rank != 1:
            assert (seen[0], seen[2]) == ("PeerLost", (1,)), seen
            assert "closed its communicator" in seen[1]


# -- a rank is held up in the middle -----------------------------------------------------------------------------------


def held_up(monkeypatch, comm, kernel, meanwhile):
    """The rank is held up just before it runs `kernel`, once; `meanwhile` happens."""
    kernels = comm._exchanger.session.kernels
    real = getattr(kernels, kernel)

    def run(*arguments, **options):
        monkeypatch.undo()
        meanwhile()
        return real(*arguments, **options)

    monkeypatch.setattr(kernels, kernel, run)


def give_up(comm, work):
    sequencer = comm._exchanger.session.sequencer
    sequencer.timeout = 0.05
    assert caught(work.wait)[0] == "PeerTimeout"
    sequencer.timeout = 20


def both_go_on(comms):
    batch = Batch(2, 3)
    works = [batch.send(comm, "dispatch_async") for comm in comms]
    run_in_turns(works)
    for rank, work in enumerate(works):
        batch.check_received(work.wait(), rank)


def test_rows_that_come_too_late_overwrite_nothing(monkeypatch):
    """Rank 0 gives up while rank 1 is about to write; what rank 0 does with its memory then is safe from the writer."""
    with in_one_thread(2) as comms:
        batch = Batch(2, 2)
        handle = receive_all(comms, batch)[0].handle
        works = [batch.send(comm, "dispatch_async") for comm in comms]
        works[0].step()
        works[1].step()
        works[0].step()
        kept = []

        def meanwhile():
            give_up(comms[0], works[0])
            for _ in range(4):
                kept.append(comms[0].combine_buffer(handle, torch.float32).fill_(7.0))

        held_up(monkeypatch, comms[1], "push_rows", meanwhile)
        works[1].step()
        assert len(kept) == 4
        assert all(bool((rows == 7.0).all()) for rows in kept)
        kind, text, _ = caught(works[1].wait)
        assert kind == "PeerFailed", text
        assert "rank 0" in text
        kept.clear()
        both_go_on(comms)
        assert [comm.stats["receive_blocks_alive"] for comm in comms] == [0, 0]


def test_rows_that_are_read_too_late_are_not_believed(monkeypatch):
    """Rank 0 gives up, and changes its rows, while rank 1 is about to read them."""
    with in_one_thread(2) as comms:
        batch = Batch(2, 2)
        received = receive_all(comms, batch)
        works = [comm.combine_async(one.x, one.handle) for comm, one in zip(comms, received, strict=True)]
        works[0].step()

        def meanwhile():
            give_up(comms[0], works[0])
            received[0].x.fill_(float("nan"))

        held_up(monkeypatch, comms[1], "combine_rows", meanwhile)
        kind, text, _ = caught(works[1].wait)
        assert kind == "PeerFailed", text
        assert "rank 0" in text
        received.clear()
        works.clear()
        both_go_on(comms)
        assert [comm.stats["receive_blocks_alive"] for comm in comms] == [0, 0]
