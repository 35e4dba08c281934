"""One-sided puts of transport `ucx`: who closes or dies while they are under way, and memory that is given back."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from exchange_ranks import Batch
from one_sided_worlds import WIRES, OneSided
from ucx_ranks import MIB, PATIENCE, SEGMENT, address_of, needs_ucx, open_transport, pattern, run, wait

import moecomm
from moecomm.errors import PeerLost
from moecomm.testing import RankDied
from moecomm.testing.compare import assert_bitwise_equal
from moecomm.transports.base import WaitOutcome

# -- the end -----------------------------------------------------------------------------------------------------------


@needs_ucx
def test_what_was_put_before_closing_arrives():
    run(OneSided(put_and_close, "tcp"), 2)


def put_and_close(group):
    opened = open_transport(group)
    region = opened.allocate(8 * MIB)
    data = pattern(8 * MIB, 1)
    if group.rank == 1:
        opened.put(region, 0, address_of(data), 100, 0)
        opened.flush()
        opened.put(region, 0, address_of(data), len(data), 0)
        assert opened._wire.num_one_sided(0) > 0
        opened.close()
    else:
        assert opened.wait(0, 1, PATIENCE) is WaitOutcome.LOST
        assert ctypes.string_at(region.address, len(data)) == data
        opened.close()


@needs_ucx
@pytest.mark.parametrize("name", WIRES)
def test_a_rank_that_puts_to_a_killed_one_goes_on(name):
    results = run(OneSided(put_to_the_killed, name), 2, return_exceptions=True)
    assert isinstance(results[1], RankDied), results
    assert results[0] == "went on", results


def put_to_the_killed(group):
    opened = open_transport(group)
    region = opened.allocate(8 * MIB)
    data = pattern(8 * MIB, 0)
    opened.put(region, 0, address_of(data), 100, 1 - group.rank)
    opened.flush()  # has the key
    pids = group.all_gather(os.getpid())
    if group.rank == 1:
        time.sleep(PATIENCE)
    os.kill(pids[1], signal.SIGSTOP)
    opened.put(region, 0, address_of(data), MIB, 1)
    assert opened._wire.num_one_sided(1) > 0
    opened.signal(1, 0)  # waits for puts that nobody takes in
    os.kill(pids[1], signal.SIGKILL)
    for _ in range(10):
        opened.put(region, 0, address_of(data), len(data), 1)
        opened.signal(1, 0)
    opened.flush()
    assert opened.wait(0, 1, PATIENCE) is WaitOutcome.LOST
    assert opened.gone() == [1]
    opened.close()
    return "went on"


@needs_ucx
def test_a_lost_rank_is_named():
    told = run(OneSided(lose, "tcp"), 3, return_exceptions=True)
    assert told[:2] == [(2,), (2,)], told


def lose(group):
    comm = moecomm.Communicator(group, num_experts=group.size, hidden=4096, num_topk=1, transport="ucx")
    x, idx = torch.ones(300, 4096), torch.arange(300)[:, None] % group.size
    for _ in range(2):
        comm.dispatch(x, idx)
    if comm.rank == 2:
        os._exit(9)
    with pytest.raises(PeerLost) as found:
        comm.dispatch(x, idx)
    comm.close()
    return found.value.peers


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import test_ucx_one_sided_end as here
if __name__ == "__main__":
    from ucx_ranks import run
    run(here.OneSided(here.exchange_and_close, "tcp"), 2)
"""


@needs_ucx
def test_ucx_finds_nothing_left_at_the_end(tmp_path):
    """UCX itself warns of memory that is still registered, and of requests and keys that were not returned."""
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent)), encoding="utf-8")
    log = tmp_path / "ucx"
    environment = os.environ | {"UCX_LOG_LEVEL": "warn", "UCX_LOG_FILE": f"{log}-%p"}
    done = subprocess.run([sys.executable, script], env=environment, timeout=120, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    logs = list(tmp_path.glob("ucx-*"))
    assert len(logs) >= 2, "UCX has not logged where it was told to"
    assert [path.read_text(encoding="utf-8") for path in logs if path.read_bytes()] == []


def exchange_and_close(group):
    opened = open_transport(group)
    region = opened.allocate(3 * SEGMENT)
    data = pattern(3 * SEGMENT, 0)
    for number in range(1, 3):
        opened.put(region, 0, address_of(data), len(data), 1 - group.rank)
        opened.signal_all(0, 1)
        wait(opened, 0, number)
    assert opened._wire.registered_bytes() == 3 * SEGMENT
    assert opened.mapping(region).pinned_bytes() == 3 * SEGMENT
    mapping = opened.mapping(region)
    group.all_gather(None)
    opened.close()
    assert mapping.pinned_bytes() == 0


# -- memory that is given back -----------------------------------------------------------------------------------------


@needs_ucx
@pytest.mark.parametrize("name", WIRES)
def test_memory_is_given_back_when_the_peers_have_returned_its_keys(name):
    run(OneSided(give_back, name), 3)


def give_back(group):
    """A hole punched at any time loses nothing that was put afterwards."""
    opened = open_transport(group)
    region = opened.allocate(SEGMENT + MIB)  # two segments
    mapping = opened.mapping(region)
    share = region.nbytes // group.size
    signalled = 0

    def expected(rank):
        return bytes([1 + (signalled * group.size + rank) % 255]) * share

    def exchange():
        nonlocal signalled
        signalled += 1
        data = expected(group.rank)
        for rank in range(group.size):
            opened.put(region, share * group.rank, address_of(data), share, rank)
        opened.signal_all(0, 1)
        wait(opened, 0, signalled)
        look()
        group.all_gather(None)

    def look():
        for rank in set(range(group.size)) - {group.rank}:
            assert ctypes.string_at(region.address + share * rank, share) == expected(rank), f"what {rank} has put"

    for is_busy in (True, False):
        exchange()  # asks for the keys
        exchange()
        assert mapping.pinned_bytes() == opened._wire.registered_bytes() >= SEGMENT
        mapping.punch(0, region.nbytes)
        look()  # pages that peers may write to stay
        group.all_gather(None)
        for _ in range(3 * is_busy):
            exchange()  # while keys are on their way back
        deadline = time.monotonic() + PATIENCE
        while opened._wire.registered_bytes() > 0 and time.monotonic() < deadline:
            mapping.punch(0, region.nbytes)  # what was put meanwhile has been registered anew
            time.sleep(0.01)
        assert mapping.pinned_bytes() == opened._wire.registered_bytes() == 0
        group.all_gather(None)
        mapping.punch(0, region.nbytes)
        assert not any(ctypes.string_at(region.address, region.nbytes))
        group.all_gather(None)
    opened.close()


@needs_ucx
def test_trimming_between_exchanges_changes_no_row():
    assert all(run(OneSided(trim_between, "tcp"), 2))


def trim_between(group):
    options = {"num_experts": 7, "hidden": 16, "num_topk": 3, "max_tokens_per_rank": 64}
    with (
        moecomm.Communicator(group, transport="ucx", **options) as comm,
        moecomm.Communicator(group, transport="collective", **options) as other,
    ):
        for seed in range(12):
            batch = Batch(group.size, seed, torch.bfloat16)
            for how in ({}, {"layout": "flat"}, {"mode": "low_latency"}):
                received, wanted = batch.send(comm, **how), batch.send(other, **how)
                assert_bitwise_equal(received.x, wanted.x, f"dispatch {how} {seed}")
                got = comm.combine(received.x * 2, received.handle)
                assert_bitwise_equal(got, other.combine(wanted.x * 2, wanted.handle), f"combine {how} {seed}")
            del received, wanted, got
            comm.trim()
            if seed % 4 == 3:
                time.sleep(1.2)  # keys go back at leisure
        return comm._exchanger.session.transport._wire.num_one_sided(1 - group.rank) > 0
