"""Transport `ucx` beyond the contract: sizes, order, deaths, leaks. The ranks are processes of this host."""

import ctypes
import os
import signal
import threading
import warnings

import pytest
from ucx_ranks import MIB, PATIENCE, address_of, needs_ucx, open_transport, pattern, run, wait

from moecomm.errors import PeerTimeout
from moecomm.testing import RankDied
from moecomm.transports.base import WaitOutcome

# -- what arrives ------------------------------------------------------------------------------------------------------


@needs_ucx
def test_puts_of_every_size_arrive_whole():
    run(put_sizes, 2)


def put_sizes(group):
    transport = open_transport(group)
    other = 1 - group.rank
    lengths = [0, 1, 3, 4095, 4096, 4097, 65_537, 262_143, 262_144, 262_145, MIB + 7, 8 * MIB]
    region = transport.allocate(sum(lengths) + len(lengths))
    offset = 0
    for length in lengths:
        # The source is written over after each put: what is sent is what was there.
        data = bytearray(pattern(length, group.rank))
        source = (ctypes.c_char * max(1, length)).from_buffer(data) if length else ctypes.create_string_buffer(1)
        transport.put(region, offset, ctypes.addressof(source), length, other)
        ctypes.memset(source, 0xEE, max(1, length))
        offset += length + 1
    transport.signal(other, 0)
    transport.signal(group.rank, 0)
    wait(transport, 0, 1)
    offset = 0
    for length in lengths:
        got = ctypes.string_at(region.address + offset, length + 1)
        assert got == pattern(length, other) + b"\0", f"{length} bytes"
        offset += length + 1
    group.all_gather(None)
    transport.close()


@needs_ucx
def test_many_small_puts_are_all_there_when_the_signal_is():
    run(put_many, 3)


def put_many(group):
    transport = open_transport(group)
    num_puts = 3000
    region = transport.allocate(8 * num_puts * group.size)
    numbers = (ctypes.c_uint64 * num_puts)(*range(1, num_puts + 1))
    base = ctypes.addressof(numbers)
    for rank in range(group.size):
        for i in range(num_puts):
            transport.put(region, 8 * (num_puts * group.rank + i), base + 8 * i, 8, rank)
        transport.signal(rank, 0)
    wait(transport, 0, 1)
    assert ctypes.string_at(region.address, region.nbytes) == bytes(numbers) * group.size
    group.all_gather(None)
    transport.close()


@needs_ucx
@pytest.mark.parametrize("rendezvous_from", ["auto", "4000"])
@pytest.mark.parametrize("large", [5000, 100_000, 3 * MIB])
def test_a_signal_never_overtakes_a_large_put_and_a_small_one(large, rendezvous_from):
    run(alternate, 2, large, rendezvous_from, 40)


def alternate(group, large, rendezvous_from, num_rounds):
    """Each round: poison my memory, say so, send the other a large put, a small one and the signal.

    A large message that is fetched by its receiver (rendezvous) comes after small ones that were sent later.
    """
    os.environ["UCX_RNDV_THRESH"] = rendezvous_from
    try:
        transport = open_transport(group)
    finally:
        del os.environ["UCX_RNDV_THRESH"]
    region = transport.allocate(large + 16)
    other = 1 - group.rank
    for number in range(1, num_rounds + 1):
        ctypes.memset(region.address, 0xFF, region.nbytes)
        transport.signal_all(1, 1)
        wait(transport, 1, number)
        data = bytes([number]) * (large + 16)
        transport.put(region, 0, address_of(data), large, other)
        transport.put(region, large, address_of(data), 16, other)
        transport.signal_all(0, 1)
        wait(transport, 0, number)
        got = ctypes.string_at(region.address, region.nbytes)
        assert got == data, f"round {number}: {set(got)}"
    group.all_gather(None)
    transport.close()


@needs_ucx
def test_flush_returns_when_the_bytes_are_there():
    run(flush_and_look, 2)


def flush_and_look(group):
    transport = open_transport(group)
    region = transport.allocate(2 * MIB)
    data = pattern(2 * MIB, group.rank)
    transport.put(region, 0, address_of(data), len(data), 1 - group.rank)
    transport.flush()
    group.all_gather(None)  # not through the transport
    assert ctypes.string_at(region.address, region.nbytes) == pattern(2 * MIB, 1 - group.rank)
    group.all_gather(None)
    transport.close()


@needs_ucx
def test_a_peer_that_computes_takes_in_what_is_sent():
    run(send_to_the_busy, 2)


def send_to_the_busy(group):
    """Far more than may be in flight goes to a rank that makes no call; only afterwards does it look."""
    transport = open_transport(group)
    region = transport.allocate(32 * MIB)
    if group.rank == 0:
        data = pattern(32 * MIB, 0)
        transport.put(region, 0, address_of(data), len(data), 1)
        transport.flush()
    group.all_gather(None)
    if group.rank == 1:
        assert ctypes.string_at(region.address, region.nbytes) == pattern(32 * MIB, 0)
    group.all_gather(None)
    transport.close()


@needs_ucx
def test_threads_of_a_rank_may_send_and_wait_at_once():
    run(send_from_threads, 2)


def send_from_threads(group):
    """Each of four threads has a slot and a part of the region, and exchanges with its namesake on the other rank."""
    num_threads, num_rounds, size = 4, 40, 30_000
    transport = open_transport(group, num_slots=num_threads)
    region = transport.allocate(2 * num_threads * size)
    failures = []

    def exchange(slot):
        for number in range(1, num_rounds + 1):
            offset = (2 * slot + number % 2) * size
            data = bytes([number + slot]) * size
            transport.put(region, offset, address_of(data), size, 1 - group.rank)
            transport.signal_all(slot, 1)
            if number % 10 == slot:
                transport.flush()
            outcome = transport.wait(slot, number, PATIENCE)
            if outcome is not WaitOutcome.REACHED or ctypes.string_at(region.address + offset, size) != data:
                failures.append((slot, number, outcome))
                return

    threads = [threading.Thread(target=exchange, args=(slot,)) for slot in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
    group.all_gather(None)
    transport.close()


# -- who leaves, dies, or stands still ---------------------------------------------------------------------------------


@needs_ucx
def test_what_was_sent_before_closing_arrives():
    run(send_and_close, 3)


def send_and_close(group):
    for number in range(5):
        transport = open_transport(group)
        region = transport.allocate(MIB)
        group.all_gather(None)
        if group.rank > 0:
            data = pattern(MIB, number)
            if group.rank == 1:
                transport.put(region, 0, address_of(data), len(data), 0)
            transport.signal(0, 0)
            transport.close()
        else:
            transport.signal(0, 0)
            wait(transport, 0, 1)
            assert ctypes.string_at(region.address, region.nbytes) == pattern(MIB, number)
            assert transport.wait(0, 2, PATIENCE) is WaitOutcome.LOST
            assert set(transport.gone()) <= {1, 2}
            transport.close()
        group.all_gather(None)


@needs_ucx
def test_a_rank_that_sends_to_a_killed_one_goes_on():
    results = run(send_to_the_killed, 2, return_exceptions=True)
    assert isinstance(results[1], RankDied), results
    assert results[0] == "went on", results


def send_to_the_killed(group):
    transport = open_transport(group)
    region = transport.allocate(8 * MIB)
    group.all_gather(None)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    data = bytes(8 * MIB)
    for _ in range(20):
        transport.put(region, 0, address_of(data), len(data), 1)
        transport.signal(1, 0)
    transport.flush()
    assert transport.wait(0, 1, PATIENCE) is WaitOutcome.LOST
    assert transport.gone() == [1]
    assert "rank 1 (pid" in transport.describe_peer(1)
    transport.close()
    return "went on"


@needs_ucx
def test_a_put_to_a_rank_that_stands_still_ends_with_a_named_error():
    run(send_to_the_stopped, 2)


def send_to_the_stopped(group):
    transport = open_transport(group)
    transport.stall_timeout = 0.5
    region = transport.allocate(32 * MIB)
    pids = group.all_gather(os.getpid())
    if group.rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
        data = bytes(32 * MIB)
        try:
            # What may be in flight, and what the system's buffers take, is less than one such put.
            with pytest.raises(PeerTimeout, match=rf"put: .* rank 1 \(pid {pids[1]}") as caught:
                transport.put(region, 0, address_of(data), len(data), 1)
            assert caught.value.peers == (1,)
            with pytest.raises(PeerTimeout, match="flush: "):
                transport.flush()
            assert transport.gone() == []  # it may come back
        finally:
            os.kill(pids[1], signal.SIGCONT)
        transport.stall_timeout = PATIENCE
        transport.flush()
    group.all_gather(None)
    transport.close()


@needs_ucx
def test_a_forked_child_may_close_what_it_inherits():
    run(fork_and_close, 2)


def fork_and_close(group):
    transport = open_transport(group)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        child = os.fork()
    if child == 0:
        transport.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    transport.signal_all(0, 1)
    wait(transport, 0, 1)
    assert transport.gone() == []
    group.all_gather(None)
    transport.close()


@needs_ucx
def test_nothing_is_left_after_many_transports():
    run(open_and_close, 2, 100)


def open_and_close(group, num_cycles):
    def used():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def cycle():
        transport = open_transport(group)
        transport.signal_all(0, 1)
        wait(transport, 0, 1)
        group.all_gather(None)
        transport.close()

    cycle()  # what is made once per process
    before = used()
    for _ in range(num_cycles):
        cycle()
    assert used() == before
