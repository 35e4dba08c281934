"""NVSHMEM where it cannot be used: refusals without a device, what is imported when, and the unique id's way."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moecomm import Communicator, TransportUnavailable
from moecomm.cli.facts import collect
from moecomm.groups import SoloGroup
from moecomm.testing import launch
from moecomm.transports import composed, nvshmem_engine, peers, ucx
from moecomm.transports.nvshmem import NvshmemTransport
from moecomm.transports.nvshmem_engine import EngineError, Nvshmem4py, problem_here
from moecomm.transports.nvshmem_library import NvshmemLibrary, find_library, missing_package
from moecomm.transports.peers import my_identity
from moecomm.transports.ucx_library import UcxLibrary

ROOT = Path(__file__).parents[1]
HERE = find_library().problem or missing_package()
needs_nvshmem = pytest.mark.skipif(bool(HERE), reason=f"needs NVSHMEM and nvshmem4py: {HERE}")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def two_ranks(**changes):
    me = dataclasses.replace(my_identity(SoloGroup(), "cuda"), in_process=False)
    return me, dataclasses.replace(me, **{"rank": 1, "process": "another", **changes})


def found(monkeypatch, library="", package="", cuda="13.0", is_available=True):
    """Makes this process look as if it had all that NVSHMEM needs, or not."""
    monkeypatch.setattr(nvshmem_engine, "find_library", lambda: NvshmemLibrary("lib", "3.8.0", library))
    monkeypatch.setattr(nvshmem_engine, "missing_package", lambda: package)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"library": "the library NVSHMEM (x) was not found."}, "the library NVSHMEM (x) was not found."),
        ({"package": "the Python package nvshmem4py is not installed."}, "the Python package nvshmem4py"),
        ({"cuda": None}, "this torch is built without CUDA."),
        ({"is_available": False}, "torch finds no CUDA device here."),
    ],
)
def test_each_thing_that_is_missing_is_a_refusal(monkeypatch, changes, words):
    found(monkeypatch, **changes)
    me, peer = two_ranks()
    assert all(answer.startswith(words) for answer in NvshmemTransport.probe(me, [me, peer]))


def test_processes_that_have_all_reach_each_other(monkeypatch):
    found(monkeypatch)
    for owner in (composed, ucx):
        monkeypatch.setattr(owner, "find_library", lambda: UcxLibrary("lib"))
    me, peer = two_ranks(host="another", hostname="another")
    assert NvshmemTransport.probe(me, [me, peer]) == [None, None]
    assert NvshmemTransport.remedy().endswith(".")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device_type": "cpu"}, "it carries CUDA tensors; those of rank 1 are on cpu."),
        ({"process": None}, "is a thread of the same process."),
        ({"nvshmem_problem": "no library."}, "no library."),
    ],
)
def test_a_peer_that_cannot_is_named(monkeypatch, changes, words):
    found(monkeypatch)
    me, _ = two_ranks()
    _, peer = two_ranks(**{name: me.process if value is None else value for name, value in changes.items()})
    own, others = NvshmemTransport.probe(me, [me, peer])
    assert own is None
    assert others.endswith(words)
    assert "rank 1" in others


def test_between_hosts_the_processes_must_be_able_to_talk(monkeypatch):
    found(monkeypatch)
    me, peer = two_ranks(host="another", hostname="another", ucx_problem="no UCX there.")
    own, others = NvshmemTransport.probe(me, [me, peer])
    assert own is None
    assert others.startswith("what the processes say to each other needs a transport of its own. ")
    assert "shm+ucx: rank 1 (pid" in others
    assert "no UCX there." in others


def cuda_peers(group):
    return [peer.nvshmem_problem for peer in peers.gather_peers(group, "cuda")]


@without_gpu
def test_ranks_on_cuda_tell_each_other_what_they_lack():
    assert launch(cuda_peers, 2, backend="processes", timeout=30) == [[problem_here()] * 2] * 2
    assert problem_here().endswith(".")


def test_tensors_on_the_cpu_are_refused_with_a_remedy():
    with pytest.raises(TransportUnavailable) as caught:
        Communicator(None, num_experts=2, hidden=4, num_topk=1, max_tokens_per_rank=4, transport="nvshmem")
    assert "it carries cuda tensors, not cpu ones." in str(caught.value)
    assert "pip install 'moecomm[nvshmem]'" in caught.value.remedy


def test_info_names_the_transport_and_its_packages():
    facts = collect()
    [about] = [one for one in facts["transports"] if one["name"] == "nvshmem"]
    assert about["device_types"] == ["cuda"]
    assert about["crosses_hosts"]
    assert torch.cuda.is_available() or "torch finds no CUDA device" in about["refuses"]["other hosts"]
    parts = {part["name"]: part for part in facts["optional"]}
    for package in ("nvidia-nvshmem-cu13", "nvshmem4py-cu13"):
        assert "moecomm[nvshmem]" in parts[package]["remedy"]
        assert "transport nvshmem" in parts[package]["gives"]


def test_import_and_refusal_import_neither_nvshmem4py_nor_triton():
    code = (
        "import sys, moecomm\n"
        "from moecomm.transports.nvshmem import NvshmemTransport\n"
        "from moecomm.transports.nvshmem_engine import problem_here\n"
        "problem_here()\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('nvshmem', 'cupy', 'triton')])\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


# -- with NVSHMEM, without a GPU ---------------------------------------------------------------------------------------


def exchange_unique_id(group):
    """The id as the runtime sends it: rank 0 makes it, all have it, and nvshmem4py takes it back unchanged."""
    engine = Nvshmem4py()
    ids = group.all_gather(engine.unique_id() if group.rank == 0 else b"")
    back = engine._core.get_unique_id(empty=True)
    nvshmem_engine.fill(back, ids[0])
    return ids[0], bytes(back._data.tobytes()), engine.is_started()


@needs_nvshmem
def test_a_unique_id_reaches_another_process_whole():
    (sent, mine, is_started), (got, theirs, _) = launch(exchange_unique_id, 2, backend="processes", timeout=60)
    assert len(sent) == 128
    assert any(sent)
    assert sent == got == mine == theirs
    assert not is_started


@needs_nvshmem
@without_gpu
def test_a_start_without_a_device_is_an_error_and_not_the_end():
    engine = Nvshmem4py()
    with pytest.raises(EngineError, match="NVSHMEM cannot start as rank 0 of 1"):
        engine.start(bytes(128), 0, 1)


@needs_nvshmem
def test_the_bindings_have_all_that_is_called():
    bindings = Nvshmem4py()._bindings
    names = ("calloc", "free", "ptr", "my_pe", "n_pes", "init_status", "cumodule_init", "putmem_on_stream")
    assert not [name for name in (*names, "quiet_on_stream") if not callable(getattr(bindings, name, None))]
