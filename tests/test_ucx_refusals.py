"""Whom transport `ucx` does not let in, and what it says where there is no UCX."""

import ctypes
import dataclasses
import logging
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from ucx_ranks import MIB, PATIENCE, address_of, needs_ucx, open_transport, run, wait

from moecomm import _C
from moecomm.errors import TransportUnavailable
from moecomm.groups import Group, LocalHub, SoloGroup
from moecomm.transports import composed, ucx, ucx_library
from moecomm.transports.composed import ComposedTransport
from moecomm.transports.peers import gather_peers, my_identity
from moecomm.transports.registry import choose
from moecomm.transports.ucx import UcxTransport
from moecomm.transports.ucx_library import UcxLibrary, find_library

# -- strangers ---------------------------------------------------------------------------------------------------------


@needs_ucx
def test_who_does_not_know_the_secret_changes_nothing():
    run(let_a_stranger_write, 2)


def let_a_stranger_write(group):
    """Rank 1 has a second connection to rank 0, in its own name, with the right address and the wrong secret."""
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
        stranger = _C.UcxWire(find_library().path, 1, 2, board, yields=False)
        stranger.connect([addresses[0], b""], b"\0" * 16)
        stranger.set_region(0, _C.Mapping.create_private(2 * MIB))
        data = b"\xff" * (2 * MIB)
        stranger.allow_one_sided(0, 1)
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
        assert transport._wire.registered_bytes() == 0
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


@needs_ucx
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
    assert choice.transport is ComposedTransport
    assert set(choice.refusals) == {"local", "shm"}


def test_a_host_without_ucx_is_refused_by_name_on_every_rank(monkeypatch):
    monkeypatch.setattr(ucx, "find_library", lambda: UcxLibrary("libucp.so.0", "1.22.0"))
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


def test_neighbours_need_ucx_as_well_where_it_is_to_carry_bytes(monkeypatch):
    """Each rank has a wire, so without UCX `shm+ucx` is refused, also where all ranks share their memory."""
    monkeypatch.setattr(composed, "find_library", lambda: UcxLibrary(problem="there is none."))
    peers = [peer for peer in two_hosts() if peer.rank == 0]
    assert ComposedTransport.probe(peers[0], peers) == ["there is none."]
