"""Whole communicators over transport nvshmem, on the stand-in device, with doubles of NVSHMEM and of its network below.

A process per rank. Rank r has the PE R - 1 - r, and as many neighbouring PEs as said address each other. What kernels
put arrives late, in pieces and in any order; see `late_network.py`.
"""

import os
import tempfile

from late_device import LateDevice
from late_network import LateNetwork
from late_ranks import SIZES, compare_with_native, exchange
from nvshmem_double import Double, DoubleTransport

from moecomm import Communicator
from moecomm.devices.base import DeviceIdentity
from moecomm.testing import launch
from moecomm.transports import nvshmem_engine, registry

MEMORY = 1 << 20


def run(fn, num_ranks, per_domain, *args, seed=0, timeout=100, **options):
    """Calls fn(group, *args) on every rank."""
    with tempfile.TemporaryDirectory() as folder:
        form = (folder, per_domain, seed)
        return launch(_prepared, num_ranks, form, fn, args, backend="processes", timeout=timeout, **options)


def _prepared(group, form, fn, args):
    """As the first function of its process: NVSHMEM seems to be here, and is the double."""
    folder, per_domain, seed = form
    Double.reset(folder)
    Double.per_domain = per_domain
    Double.make_network = lambda heaps, pe, nbytes: LateNetwork(100 * seed + pe, heaps, pe, nbytes)
    known, problem_here = dict(registry._known), nvshmem_engine.problem_here
    registry._known["nvshmem"] = "nvshmem_double:DoubleTransport"
    nvshmem_engine.problem_here = lambda: Double.fault
    try:
        return fn(group, *args)
    finally:
        Double.unplug()
        Double.make_network = None
        nvshmem_engine.problem_here = problem_here
        registry._known.update(known)


def device_of(group, delay=0.0, **options):
    """Each rank has a GPU of its own, which no other process has mapped."""
    return LateDevice(delay, identity=DeviceIdentity(f"gpu {group.rank}", (f"gpu {group.rank}",)), **options)


def opened(group, device, **options):
    return Communicator(group, **(SIZES | {"memory_limit": MEMORY, "device": device, "transport": "nvshmem"} | options))


def compare(group, dtype, kinds, transport="nvshmem"):
    """The same calls on the stand-in device and on the native kernels give the same bits."""
    device = device_of(group, 5e-4 * group.rank)
    with opened(group, device, transport=transport) as comm:
        assert comm.transport_name == DoubleTransport.name
        got = exchange(comm, dtype, kinds)
        told = comm.topology.domain_of, comm.explain(), comm.stats
    device.end()
    calls = set(Double.log)
    compare_with_native(group, got, dtype, kinds)
    return *told, calls


def die():
    os._exit(3)
