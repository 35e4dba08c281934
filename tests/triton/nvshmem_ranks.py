"""Whole communicators over transport nvshmem, on the stand-in device, with doubles of NVSHMEM and of its network below.

A process per rank. Rank r has the PE R - 1 - r, and as many neighbouring PEs as said address each other. What kernels
put arrives late, in pieces and in any order; see `late_network.py`.
"""

import tempfile
from dataclasses import dataclass

import torch
from late_device import LateDevice
from late_network import LateNetwork
from late_ranks import SIZES, compare_with_native, exchange
from nvshmem_double import Double, DoubleTransport

from moecomm import Communicator, communicator
from moecomm.devices.base import DeviceIdentity
from moecomm.testing import launch
from moecomm.testing.contracts import World
from moecomm.transports import nvshmem_engine, registry

MEMORY = 1 << 20


def run(fn, num_ranks, per_domain, *args, seed=0, slowness=1, timeout=200, **options):
    """Calls fn(group, *args) on every rank, over a network of that seed and slowness."""
    with tempfile.TemporaryDirectory() as folder:
        form = (folder, per_domain, seed, slowness)
        return launch(_prepared, num_ranks, form, fn, args, backend="processes", timeout=timeout, **options)


def _prepared(group, form, fn, args):
    """As the first function of its process: NVSHMEM seems to be here, and is the double."""
    folder, per_domain, seed, slowness = form
    Double.reset(folder)
    Double.per_domain = per_domain
    Double.make_network = lambda heaps, pe, nbytes: LateNetwork(100 * seed + pe, heaps, pe, nbytes, slowness)
    known, problem_here, goodbye = dict(registry._known), nvshmem_engine.problem_here, DoubleTransport.goodbye_timeout
    registry._known["nvshmem"] = "nvshmem_double:DoubleTransport"
    nvshmem_engine.problem_here = lambda: Double.fault
    DoubleTransport.goodbye_timeout = 20.0  # who interprets kernels is late
    torch.use_deterministic_algorithms(True)  # what torch makes uninitialised is NaN
    try:
        return fn(group, *args)
    finally:
        torch.use_deterministic_algorithms(False)
        Double.unplug()
        Double.make_network = None
        nvshmem_engine.problem_here, DoubleTransport.goodbye_timeout = problem_here, goodbye
        registry._known.update(known)


class OwnDevice(LateDevice):
    """Each rank has a GPU of its own, which no other process has mapped."""

    def __init__(self, group, delay=0.0, **options):
        identity = DeviceIdentity(f"gpu {group.rank}", (f"gpu {group.rank}",))
        super().__init__(delay, identity=identity, **options)

    def default_memory_limit(self, num_sharers):
        return MEMORY


def opened(group, device, **options):
    return Communicator(group, **(SIZES | {"memory_limit": MEMORY, "device": device, "transport": "nvshmem"} | options))


def compare(group, dtype, kinds, transport="nvshmem", **options):
    """The same calls on the stand-in device and on the native kernels give the same bits."""
    device = OwnDevice(group, 5e-4 * group.rank)
    with opened(group, device, transport=transport, **options) as comm:
        assert comm.transport_name == DoubleTransport.name
        got = exchange(comm, dtype, kinds)
        told = comm.topology.domain_of, comm.explain(), comm.stats
    device.end()
    log = list(Double.log)
    compare_with_native(group, got, dtype, kinds)
    return *told, log


@dataclass(frozen=True)
class NvshmemWorld(World):
    """Ranks for the shipped contracts, whose communicators are on stand-in devices without knowing it.

    Attributes:
        per_domain: ranks that address each other's memory.
    """

    per_domain: int = 2

    def run(self, fn, num_ranks, *args, return_exceptions=False):
        options = {"timeout": self.timeout, "return_exceptions": return_exceptions}
        return run(_on_devices, num_ranks, self.per_domain, fn, (self.transport, *args), **options)


def _on_devices(group, fn, args):
    devices = []

    def find_device(device):
        assert device is None
        devices.append(OwnDevice(group))
        return devices[-1]

    communicator.find_device, original = find_device, communicator.find_device
    try:
        return fn(group, *args)
    finally:
        communicator.find_device = original
        for device in devices:
            device.end()
