"""Devices by name, and what is refused without a GPU; what a GPU itself does is in test_cuda_exchange.py."""

import builtins
import dataclasses
import sys

import pytest
import torch

from moecomm import Communicator, TransportUnavailable
from moecomm.devices.base import DeviceIdentity
from moecomm.devices.host import HostDevice
from moecomm.devices.registry import find_device
from moecomm.groups import SoloGroup
from moecomm.transports.nvlink import NvlinkTransport
from moecomm.transports.peers import my_identity
from moecomm.transports.registry import choose

SIZES = {"num_experts": 4, "hidden": 8, "num_topk": 2}


def peers(num_ranks=2, **changes):
    """Processes of one host with a GPU each, which reach each other; `changes` are those of the last."""
    me = my_identity(SoloGroup(), "cuda")
    names = tuple(f"GPU-{rank}" for rank in range(num_ranks))
    ranks = [
        dataclasses.replace(
            me, rank=rank, pid=me.pid + rank, process=str(rank), in_process=False, device=DeviceIdentity(name, names)
        )
        for rank, name in enumerate(names)
    ]
    ranks[-1] = dataclasses.replace(ranks[-1], **changes)
    return ranks


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_the_cpu_by_all_its_names(device):
    assert isinstance(find_device(device), HostDevice)


@pytest.mark.parametrize(
    ("device", "kind", "words"),
    [
        (3, TypeError, "device must be a torch.device, its name or None, got int"),
        ("gpu", ValueError, "device: 'gpu' is no torch device"),
        ("meta", ValueError, "device: tensors on 'meta' cannot be exchanged; cpu and cuda can"),
    ],
)
def test_other_devices_are_refused(device, kind, words):
    with pytest.raises(kind, match=words):
        Communicator(None, **SIZES, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0)])
def test_cuda_without_a_gpu(device):
    with pytest.raises(ValueError, match="torch finds no CUDA device"):
        Communicator(None, **SIZES, device=device)


def test_tensors_of_another_device_are_refused():
    with Communicator(None, **SIZES) as comm:
        assert comm.device == torch.device("cpu")
        with pytest.raises(TypeError, match="x is on meta, this communicator carries tensors on cpu"):
            comm.dispatch(torch.empty(2, 8, device="meta"), torch.zeros(2, 2, dtype=torch.int64))


def test_gpus_of_one_host_that_reach_each_other():
    ranks = peers(3)
    assert choose("auto", ranks[0], ranks).transport is NvlinkTransport
    assert choose("nvlink", ranks[2], ranks).transport is NvlinkTransport


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host": "elsewhere"}, "rank 1 .* runs on another host"),
        ({"pid_namespace": "pid:[1]"}, "another process namespace"),
        ({"device": DeviceIdentity("GPU-7")}, r"the GPU of rank 0 \(GPU-0\) cannot address that of rank 1 \(GPU-7\)"),
        (
            {"device": DeviceIdentity("GPU-1", ("GPU-0", "GPU-1"), "CuPy is not there.", "pip install cupy-cuda13x.")},
            "rank 1: CuPy is not there. Help for rank 1: pip install cupy-cuda13x",
        ),
    ],
)
def test_refusals_say_who_and_what_helps(changes, words):
    ranks = peers(**changes)
    for name in ("nvlink", "auto"):
        with pytest.raises(TransportUnavailable, match=words) as refused:
            choose(name, ranks[0], ranks)
        assert "nvidia-smi topo -p2p a" in str(refused.value)
        assert " shm: " not in str(refused.value), "transports of CPU tensors were asked"


def test_two_processes_may_use_one_gpu():
    ranks = peers(device=DeviceIdentity("GPU-0", ("GPU-0",)))
    assert choose("auto", ranks[0], ranks).transport is NvlinkTransport


def test_transports_of_other_tensors_are_refused():
    ranks = peers()
    with pytest.raises(TransportUnavailable, match="it carries cpu tensors, not cuda ones"):
        choose("shm", ranks[0], ranks)
    with pytest.raises(TransportUnavailable, match="it carries cuda tensors, not cpu ones"):
        Communicator(None, **SIZES, transport="nvlink")


def test_what_a_machine_without_cupy_says(monkeypatch):
    pytest.importorskip("triton", reason="moecomm.devices.cuda is for machines that have it")
    from moecomm.devices import cuda

    real = builtins.__import__

    def without_cupy(name, *arguments, **options):
        if name.split(".")[0] == "cupy":
            raise ImportError("No module named 'cupy'")
        return real(name, *arguments, **options)

    class Properties:
        uuid = "abc"

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    for name in [name for name in sys.modules if name.split(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without_cupy)
    identity = cuda._identity.__wrapped__(0)
    assert identity.name == "abc"
    assert identity.reachable == ("abc",)
    assert "No module named 'cupy'" in identity.ipc_problem
    assert identity.remedy.startswith("pip install cupy-cuda1")
