"""What would go wrong over rails if a rail did not wait for what it passes on or sums, or were told too early.

Before each call all receive memory is -1: experts that nobody chose, so a rail that has not waited passes on nothing.
"""

import torch
from nvshmem_mistakes import BrokenWire
from nvshmem_ranks import OwnDevice, opened

from moecomm import Communicator
from moecomm.algorithms.calls import LANE_ANSWERED, LANE_CROSSED, LANE_GRANTED
from moecomm.devices.wire_queue import WireQueue
from moecomm.kernels.registry import wire_kernels_for
from moecomm.testing import masked
from moecomm.testing.contracts.cases import random_rows

HIDDEN, TOKENS = 96, 8
CROSSING = (LANE_CROSSED, LANE_ANSWERED)


class TakesAtOnce(WireQueue):
    """Passes on rows, and adds up sums, that the hosts say are on their way."""

    def _wait(self, lane, sequence, awaited=None):
        if lane not in CROSSING:
            super()._wait(lane, sequence, awaited)


class AnswersAtOnce(WireQueue):
    """Sums what the hosts say is being asked for."""

    def _wait(self, lane, sequence, awaited=None):
        if lane != LANE_GRANTED:
            super()._wait(lane, sequence, awaited)


class SignalsCrossingFirst(BrokenWire):
    """Tells of rows and sums before it puts them."""

    def __init__(self):
        super().__init__("signal before puts")
        self._kernels = wire_kernels_for("triton")

    def push(self, wire, runs, memory, slot, **options):
        push = super().push if slot in CROSSING else self._kernels.push
        push(wire, runs, memory, slot, **options)


# What is wrong then: dispatches, combines with a sum per domain, and exact ones.
MISTAKES = {
    "": [False, False, False],
    "no wait": [True, True, True],
    "no wait for requests": [False, True, True],
    "signal before puts": [True, True, True],
}
QUEUES = {"no wait": TakesAtOnce, "no wait for requests": AnswersAtOnce}


def are_right(group, mistake):
    """Whether dispatches, combines with a sum per domain, and exact ones give what they should."""
    # Who puts is later than who waits.
    kernels = SignalsCrossingFirst() if mistake == "signal before puts" else None
    device = OwnDevice(group, 0.02 * group.rank, queue_class=QUEUES.get(mistake), wire_kernels=kernels)
    with opened(group, device, algorithm="hierarchical", hidden=HIDDEN) as comm:
        region = comm._exchanger.session.memory.region
        memory = device.bytes_at(region.address, region.nbytes, None)
        got = _calls(comm, lambda: _blank(group, memory))
        topology = comm.topology
    device.end()
    with Communicator(group, num_experts=6, hidden=HIDDEN, num_topk=3, topology=topology) as comm:
        wanted = _calls(comm, lambda: None)
    is_right = [torch.equal(*pair) for pair in zip(got, wanted, strict=True)]
    return tuple(all(is_right[kind::3]) for kind in range(3))


def _blank(group, memory):
    group.all_gather(None)  # what lies there has been looked at
    memory.fill_(0xFF)
    group.all_gather(None)


def _calls(comm, blank):
    found = []
    for step in range(2):
        x, ids = (
            random_rows((TOKENS, HIDDEN), torch.float32, f"{step} {comm.rank}"),
            masked(TOKENS, 6, 3, seed=comm.rank),
        )
        blank()
        received = comm.dispatch(x, ids)
        found.append(received.x.clone())
        handle, y = received.handle, received.x + 1
        del received
        for reduce in ("per_host", "exact"):
            blank()
            found.append(comm.combine(y, handle, reduce=reduce))
    return found
