"""Transport nvshmem over a double of NVSHMEM between processes: what is shared, in which order it ends, what fails."""

import ctypes
import os
import sys
import tempfile
import time

import pytest
import torch.distributed as dist
from nvshmem_double import HEAP_BYTES, Double, DoubleTransport

from moecomm.errors import PeerLost, TransportError, TransportUnavailable
from moecomm.groups import TorchGroup
from moecomm.testing import launch
from moecomm.testing.contracts import World, transport
from moecomm.testing.failures import RankDied
from moecomm.transports import registry
from moecomm.transports.base import WaitOutcome
from moecomm.transports.peers import gather_peers

NUM_SLOTS = 3


def opened(group):
    return DoubleTransport(group, gather_peers(group), NUM_SLOTS)


def run(fn, num_ranks, *args, **options):
    with tempfile.TemporaryDirectory() as folder:
        return launch(fresh, num_ranks, folder, fn, args, backend="processes", timeout=40, **options)


def fresh(group, folder, fn, args):
    """As the first function of its process."""
    Double.reset(folder)
    registry._known[DoubleTransport.name] = "nvshmem_double:DoubleTransport"
    try:
        return fn(group, *args)
    finally:
        del registry._known[DoubleTransport.name]


class DoubleWorld(World):
    def run(self, fn, num_ranks, *args, return_exceptions=False):
        return run(fn, num_ranks, self.transport, *args, return_exceptions=return_exceptions)


# The probe looks at the tensors' device, which here is the CPU.
CHECKS = [check for check in transport.CHECKS if check is not transport.check_probe_reaches_its_own_ranks]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_what_the_hosts_say_keeps_the_contract(check):
    check(DoubleWorld("processes", DoubleTransport.name, rank_counts=(1, 3)))


# -- symmetric memory --------------------------------------------------------------------------------------------------


def exchange(group, num_rounds):
    """Each rank puts a byte of its own to everybody, at a place of its own; near peers are also read by pointer."""
    carrier, found = opened(group), []
    first, region = carrier.allocate_symmetric(100), carrier.allocate_symmetric(64 * group.size)
    assert ctypes.string_at(region.address, region.nbytes) == bytes(region.nbytes)
    assert first.index != region.index
    assert carrier.peer(region, group.rank) == region.address
    group.all_gather(None)  # a peer that is quicker would put into it
    source = ctypes.create_string_buffer(64)
    for number in range(1, num_rounds + 1):
        ctypes.memset(source, 16 * number + group.rank, 64)
        for rank in range(group.size):
            carrier.put(region, 64 * group.rank, ctypes.addressof(source), 64, rank)
            carrier.put(region, 0, 0, 0, rank)
            carrier.signal(rank, 1)
        assert carrier.wait(1, number, 20.0) is WaitOutcome.REACHED
        found.append(ctypes.string_at(region.address, region.nbytes)[::64])
        group.all_gather(None)
    near = [rank for rank in range(group.size) if carrier.peer(region, rank) is not None]
    seen = [ctypes.string_at(carrier.peer(region, rank), 1)[0] for rank in near]
    group.all_gather(None)
    carrier.close()
    carrier.close()
    return found, near, seen, Double.log


@pytest.mark.parametrize(("num_ranks", "pairs"), [(1, [[0]]), (2, [[0, 1]] * 2), (3, [[0], [1, 2], [1, 2]])])
def test_what_was_put_is_there_when_the_host_is_signalled(num_ranks, pairs):
    for rank, (found, near, seen, log) in enumerate(run(exchange, num_ranks, 3)):
        assert found == [bytes(16 * number + source for source in range(num_ranks)) for number in (1, 2, 3)]
        assert near == pairs[rank]
        assert seen == [16 * 3] * len(near)  # what rank 0 put to the begin of each part
        calls = [call for call in log if call not in ("put", "quiet", "unique_id")]
        assert calls == ["start", "allocate", "allocate", "free", "free", "finish"]
        assert log.count("unique_id") == (rank == 0)
        assert log.index("free") > max(index for index, call in enumerate(log) if call == "quiet")


def misuse(group):
    carrier = opened(group)
    region = carrier.allocate_symmetric(64)
    for offset, nbytes in ((-1, 8), (60, 5), (65, 0), (1 << 63, 1)):
        with pytest.raises(ValueError, match=r"put: \[.*outside the region of 64 bytes"):
            carrier.put(region, offset, region.address, nbytes, 0)
    with pytest.raises(TransportUnavailable, match=f"cannot make {HEAP_BYTES} bytes of symmetric.*NVSHMEM_SYMMETRIC"):
        carrier.allocate_symmetric(HEAP_BYTES)
    Double.failing = {"no memory"} if group.rank == 1 else set()
    with pytest.raises(TransportUnavailable, match="rank 1 cannot make 64 bytes"):
        carrier.allocate_symmetric(64)
    Double.failing = set()
    Double._live.clear()  # a real heap would keep rank 0's part, too
    Double._live.add(region.address)
    carrier.close()
    with pytest.raises(ValueError, match="is closed"):
        carrier.put(region, 0, 0, 1, 0)
    with pytest.raises(ValueError, match="is closed"):
        carrier.allocate_symmetric(64)


def test_mistakes_and_missing_memory_are_said_on_every_rank():
    run(misuse, 2)


# -- one NVSHMEM for a process -----------------------------------------------------------------------------------------


def shared(group):
    one, two = opened(group), opened(group)
    one.allocate_symmetric(8)
    two.allocate_symmetric(8)
    log = Double.log
    one.close()
    ended_early = "finish" in log
    two.close()
    opened(group).close()
    return ended_early, [call for call in log if call in ("start", "free", "finish")]


def test_transports_of_a_process_share_one_that_ends_with_the_last():
    expected = ["start", "free", "free", "finish", "start", "finish"]
    assert run(shared, 3) == [(False, expected)] * 3


def join_another(group):
    """Somebody else has started NVSHMEM; it is used and left running."""
    double = Double()
    [unique_id, _] = group.all_gather(double.unique_id() if group.rank == 0 else b"")
    double.start(unique_id, group.rank, group.size)
    Double.log.clear()
    carrier = opened(group)
    carrier.allocate_symmetric(8)
    carrier.close()
    log = [call for call in Double.log if call != "quiet"]
    double.finish()
    return log


def test_one_that_runs_already_is_joined_and_not_ended():
    assert run(join_another, 2) == [["allocate", "free"]] * 2


def smaller_group(group):
    carrier = opened(group)
    pair = dist.new_group([0, 1])
    text = ""
    if group.rank < 2:
        with pytest.raises(TransportUnavailable) as caught:
            opened(TorchGroup(pair))
        text = str(caught.value)
    group.all_gather(None)
    carrier.close()
    return text


def test_another_set_of_processes_is_refused():
    first, second, _ = run(smaller_group, 3)
    assert first == second
    assert "for other processes than these 2 ranks: by rank their PEs are ['2 of 3', '1 of 3']" in first
    assert "Remedy: Make the first Communicator over all processes" in first


def one_runs_already(group):
    if group.rank == 1:
        Double._folder = "somewhere"
    with pytest.raises(TransportUnavailable, match="runs in the process of rank 1, but not in that of rank 0"):
        opened(group)


def one_cannot(group, call):
    if group.rank == 1:
        Double.fault = "torch finds no CUDA device here." if call == "problem" else ""
        Double.failing = {call}
    with pytest.raises(TransportUnavailable) as caught:
        opened(group)
    return str(caught.value)


def test_what_one_rank_lacks_all_ranks_say():
    run(one_runs_already, 2)
    texts = run(one_cannot, 2, "problem")
    assert texts[0] == texts[1]
    assert (
        "rank 1: torch finds no CUDA device here. Remedy: Install it with `pip install 'moecomm[nvshmem]'`" in texts[0]
    )


def cannot_start(group):
    if group.rank == 1:
        Double.start = lambda double, *arguments: double._called("start")
        Double.failing = {"start"}
    else:
        Double.start = lambda double, *arguments: None
    with pytest.raises(TransportUnavailable, match=r"rank 1: NVSHMEM cannot start: status 7 \(an internal error\)\."):
        opened(group)


def test_a_start_that_fails_is_said_with_its_status():
    original = Double.start
    run(with_start_restored, 2)
    assert Double.start is original


def with_start_restored(group):
    original = Double.start
    try:
        cannot_start(group)
    finally:
        Double.start = original


# -- failures ----------------------------------------------------------------------------------------------------------


def failing_calls(group):
    carrier = opened(group)
    region = carrier.allocate_symmetric(64)
    Double.failing = {"put"}
    with pytest.raises(TransportError, match=r"put: rank \d \(pid.*NVSHMEM cannot put: status 7") as caught:
        carrier.put(region, 0, region.address, 8, 1 - group.rank)
    assert (caught.value.operation, caught.value.peers) == ("put", (1 - group.rank,))
    Double.failing = {"allocate"}
    with pytest.raises(TransportError, match="allocate: "):
        carrier.allocate_symmetric(64)
    Double.failing = set()
    carrier.put(region, 0, region.address, 8, 1 - group.rank)
    Double.failing = {"quiet"}
    with pytest.raises(TransportError, match="flush: "):
        carrier.flush()
    Double.failing = set()
    carrier.close()
    return Double.log[-2:]


def test_what_nvshmem_fails_with_names_operation_status_and_rank():
    assert run(failing_calls, 2) == [["free", "finish"]] * 2


def one_dies(group):
    carrier = opened(group)
    region = carrier.allocate_symmetric(64)
    group.all_gather(None)
    if group.rank == 1:
        os._exit(3)
    while 1 not in carrier.gone():
        time.sleep(0.01)
    Double.failing = {"put"}
    with pytest.raises(PeerLost, match=r"put: rank 1 \(pid.*has gone; rank 0: NVSHMEM cannot put") as caught:
        carrier.put(region, 0, region.address, 8, 1)
    assert caught.value.peers == (1,)
    Double.failing = set()
    began = time.monotonic()
    carrier.close()
    seconds = time.monotonic() - began
    return seconds, Double.log


def test_closing_needs_no_dead_peer_and_calls_nothing_that_waits_for_it():
    (seconds, log), died = run(one_dies, 2, return_exceptions=True)
    assert isinstance(died, RankDied)
    assert seconds < 8
    assert not {"free", "finish"} & set(log)


def one_stays(group):
    """Rank 1 does not close in time: nobody waits for ever, nothing is given back, and a new start is refused."""
    carrier = opened(group)
    carrier.allocate_symmetric(64)
    if group.rank == 0:
        carrier.close()
    group.all_gather(None)
    carrier.close()
    with pytest.raises(TransportUnavailable, match="left without its peers by an earlier communicator"):
        opened(group)
    return Double.log


def test_a_rank_that_stays_keeps_the_others_from_waiting_and_nvshmem_from_ending():
    for log in run(one_stays, 2):
        assert not {"free", "finish"} & set(log)


def interpreter_ends(group):
    carrier = opened(group)
    carrier.allocate_symmetric(64)
    Double.log.clear()
    original, sys.is_finalizing = sys.is_finalizing, lambda: True
    try:
        carrier.close()
    finally:
        sys.is_finalizing = original
    return Double.log


def test_when_the_interpreter_ends_nvshmem_is_left_alone():
    assert run(interpreter_ends, 2) == [[], []]
