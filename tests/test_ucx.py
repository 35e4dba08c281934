"""Transport `ucx` beyond the contract: sizes, order, strangers, deaths, leaks. The ranks are processes of this host."""

import ctypes
import dataclasses
import logging
import os
import random
import shutil
import signal
import subprocess
import warnings
from pathlib import Path

import pytest

from moecomm import _C
from moecomm.errors import PeerTimeout, TransportUnavailable
from moecomm.groups import Group, LocalHub, SoloGroup
from moecomm.testing import RankDied, launch
from moecomm.transports import ucx, ucx_library
from moecomm.transports.base import WaitOutcome
from moecomm.transports.peers import gather_peers, my_identity
from moecomm.transports.registry import choose
from moecomm.transports.ucx import UcxTransport
from moecomm.transports.ucx_library import UcxLibrary, find_library

PATIENCE = 20.0
MIB = 1 << 20

needs_ucx = pytest.mark.skipif(bool(find_library().problem), reason=f"no UCX here: {find_library().problem}")


def run(fn, num_ranks, *args, return_exceptions=False):
    return launch(fn, num_ranks, *args, backend="processes", timeout=40, return_exceptions=return_exceptions)


def open_transport(group, num_slots=4):
    return UcxTransport(group, gather_peers(group), num_slots)


def wait(transport, slot, at_least):
    outcome = transport.wait(slot, at_least, PATIENCE)
    assert outcome is WaitOutcome.REACHED, outcome


def pattern(length, seed):
    return random.Random(f"{length} {seed}").randbytes(length)


def address_of(data):
    """The address of bytes that live as long as the caller's reference."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value


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
    region = transport.allocate(8 * MIB)
    pids = group.all_gather(os.getpid())
    if group.rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
        data = bytes(8 * MIB)
        try:
            with pytest.raises(PeerTimeout, match=rf"put: .* rank 1 \(pid {pids[1]}") as caught:
                for _ in range(8):
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


# -- strangers ---------------------------------------------------------------------------------------------------------


@needs_ucx
def test_who_does_not_know_the_secret_changes_nothing():
    run(let_a_stranger_write, 2)


def let_a_stranger_write(group):
    """Rank 1 has a second connection to rank 0, in rank 1's name, with an address that is right and a secret that is not."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("moecomm.transports").addHandler(handler)
    transport = open_transport(group)
    region = transport.allocate(2 * MIB)
    addresses = group.all_gather(transport._wire.address())
    if group.rank == 1:
        memory = _C.Mapping.create_private(4096)
        board = _C.SignalBoard(1, 4, [memory.address] * 2, [0, 0], 0, [memory])
        stranger = _C.UcxWire(find_library().path, 1, 2, board)
        stranger.connect([addresses[0], b""], b"\0" * 16)
        stranger.set_region(0, _C.Mapping.create_private(2 * MIB))
        data = b"\xff" * (2 * MIB)
        for nbytes in (1, 5000, 2 * MIB):  # by every protocol that UCX has
            assert stranger.put(0, 0, 0, address_of(data), nbytes, 1, 1, PATIENCE)
        assert stranger.signal(0, 1, 1, PATIENCE)
        # Nobody answers who does not know the secret.
        assert stranger.flush(0.5) == [0]
        stranger.close(0.0)
    group.all_gather(None)
    if group.rank == 0:
        assert not any(ctypes.string_at(region.address, region.nbytes))
        assert [transport.lane(1, source) for source in range(2)] == [0, 0]
        assert transport.gone() == []
        assert any("does not carry the group's secret" in record for record in records), records
    # The group's own connection goes on.
    transport.signal_all(0, 1)
    wait(transport, 0, 1)
    group.all_gather(None)
    transport.close()
    logging.getLogger("moecomm.transports").removeHandler(handler)


class Misled(Group):
    """A group whose member hears another secret than rank 0 has said."""

    def __init__(self, group):
        self._group = group
        self.rank, self.size, self.name = group.rank, group.size, group.name

    def all_gather(self, obj):
        gathered = self._group.all_gather(obj)
        if isinstance(obj, tuple):
            gathered[0] = (*gathered[0][:2], b"x" * 16)
        return gathered


@needs_ucx
def test_a_rank_with_another_secret_is_not_let_in():
    run(construct_with_another_secret, 3)


def construct_with_another_secret(group):
    peers = gather_peers(group)
    UcxTransport.connect_timeout, usual = 1.0, UcxTransport.connect_timeout
    try:
        with pytest.raises(TransportUnavailable, match=r"has not met rank \d \(pid"):
            UcxTransport(Misled(group) if group.rank == 2 else group, peers, 4)
    finally:
        UcxTransport.connect_timeout = usual


# -- where there is no UCX ---------------------------------------------------------------------------------------------


def test_a_rank_without_ucx_is_named_by_all():
    run(construct_without_ucx, 2)


def construct_without_ucx(group):
    peers = gather_peers(group)
    found = ucx.find_library
    if group.rank == 1:
        ucx.find_library = lambda: UcxLibrary(problem="the library UCX cannot be loaded: gone.")
    try:
        with pytest.raises(TransportUnavailable, match=r"cannot use UCX: the library .*pip install 'moecomm\[ucx\]'"):
            UcxTransport(group, peers, 4)
    finally:
        ucx.find_library = found


def two_hosts(**changes):
    me = dataclasses.replace(my_identity(SoloGroup()), in_process=False)
    far = dataclasses.replace(me, rank=1, process="another", host="far", hostname="far", **changes)
    return [me, far]


@needs_ucx
def test_hosts_are_reached_by_ucx_after_the_others_have_refused():
    peers = two_hosts()
    choice = choose("auto", peers[0], peers)
    assert choice.transport is UcxTransport
    assert set(choice.refusals) == {"local", "shm"}


def test_a_host_without_ucx_is_refused_by_name_on_every_rank():
    peers = two_hosts(ucx_problem="the library UCX cannot be loaded: none.")
    for me in peers:
        with pytest.raises(TransportUnavailable, match=r"rank 1 \(pid \d+ on far\): the library UCX cannot be loaded"):
            choose("ucx", me, peers)


def test_threads_of_one_process_are_refused():
    me = my_identity(LocalHub(2).groups()[0])
    peers = [me, dataclasses.replace(me, rank=1)]
    assert "thread of the same process" in UcxTransport.probe(me, peers)[1]


def test_no_ucx_is_a_sentence(monkeypatch):
    monkeypatch.setattr(ucx_library, "_candidates", lambda: [("libucp-of-nobody.so", 0)])
    problem = find_library.__wrapped__().problem
    assert problem.startswith("the library UCX cannot be loaded: libucp-of-nobody.so")
    assert problem.endswith(".")


@needs_ucx
def test_an_old_ucx_is_refused(monkeypatch):
    monkeypatch.setattr(_C, "UCX_API_VERSION", (99, 1))
    problem = find_library.__wrapped__().problem
    assert problem.startswith("UCX 99.1 or newer is needed, ")


def test_the_host_can_be_given(monkeypatch):
    boot = my_identity(SoloGroup()).host
    monkeypatch.setenv("MOECOMM_HOST_ID", "container-7")
    assert my_identity(SoloGroup()).host == "container-7"
    monkeypatch.setenv("MOECOMM_HOST_ID", "")
    assert my_identity(SoloGroup()).host == boot


# -- the interface of the library --------------------------------------------------------------------------------------


def test_the_declarations_are_those_of_the_library(tmp_path):
    """Compiles comparisons of sizes, offsets and constants with UCX's own headers."""
    library = find_library()
    include = Path(library.path).parents[1] / "include" if "/" in library.path else Path("/usr/include")
    if not (include / "ucp" / "api" / "ucp.h").is_file():
        pytest.skip("UCX's headers are not installed")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    root = Path(__file__).parents[1]
    source = root / "tests" / "native" / "ucp_abi.cc"
    command = [compiler, "-std=c++17", "-fsyntax-only", f"-I{root / 'csrc'}", f"-I{include}", str(source)]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert compiled.returncode == 0, compiled.stderr
