"""Ranks of the GPU benchmark's links, rehearsed: on the stand-in device, and with one mistake each."""

import dataclasses
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

import link_ranks
from late_device import LateDevice
from link_copies import LinkCopies

from moecomm.bench.ours import MoecommDispatcher
from moecomm.devices.base import DeviceIdentity


def measure_late(group, job):
    """As on GPUs that reach each other."""
    names = tuple(map(str, range(group.size)))
    device = LateDevice(delay=1e-4 * group.rank, identity=DeviceIdentity(names[group.rank], names))
    found = link_ranks.measure(group, dataclasses.replace(job, device_of=lambda rank: device))
    device.end()
    return found


def measure_apart(group, job):
    """As on GPUs that do not reach each other."""
    device = LateDevice(identity=DeviceIdentity(f"{group.rank}", (f"{group.rank}",)))
    return link_ranks.measure(group, dataclasses.replace(job, device_of=lambda rank: device))


def measure_and_die(group, job):
    if group.rank == 1:
        os._exit(17)
    return link_ranks.measure(group, job)


def measure_spoiled(group, job):
    """Rank 1's sums are one off; its copies are not made."""
    if group.rank == 1:
        right = MoecommDispatcher.combine, LinkCopies.run
        MoecommDispatcher.combine = lambda self, *args: right[0](self, *args) + 1
        LinkCopies.run = lambda self: None
    try:
        return measure_late(group, job)
    finally:
        if group.rank == 1:
            MoecommDispatcher.combine, LinkCopies.run = right
