"""What would go wrong over a network if the order were kept less well, on ranks that cannot address each other."""

import torch
from far_ranks import broken_push
from late_ranks import SIZES
from nvshmem_ranks import OwnDevice, opened

from moecomm import Communicator
from moecomm.algorithms.calls import LANE_DONE
from moecomm.devices.wire_queue import WireQueue
from moecomm.kernels.registry import wire_kernels_for
from moecomm.testing import masked
from moecomm.testing.contracts.cases import random_rows

# Those of few runs, which one program puts; and those of more.
FEW = ("", "signal before puts", "no fence", "wait too low", "no wait")
MANY = ("", "no quiet", "first part signals")


class BrokenWire:
    """Pushes with a mistake; waits as it should."""

    def __init__(self, mistake):
        self._mistake = mistake
        self.wait = wire_kernels_for("triton").wait

    def push(self, wire, runs, memory, slot, *, n, parts, arrivals, status, to=None):
        first, num = (wire.rank, wire.num_ranks) if to is None else (to - 1, 1)
        broken_push[(num * parts,)](
            *(runs.table, runs.starts, memory.address, memory.address, first, wire.num_ranks, wire.boards),
            *(wire.pes, wire.board, wire.lane(slot), n, arrivals, status),
            MISTAKE=self._mistake,
            PARTS=parts,
        )


class WaitsTooLow(WireQueue):
    """Is content with what the call before has brought."""

    def wait(self, lane, sequence):
        super().wait(lane, sequence - (lane == LANE_DONE))


class NeverWaits(WireQueue):
    """Takes the hosts' word for the devices'."""

    def wait(self, lane, sequence):
        """Nothing is waited for."""


QUEUES = {"wait too low": WaitsTooLow, "no wait": NeverWaits}


def is_right(group, mistake, has_weights):
    """Whether a few exchanges give what they should."""
    kernels = BrokenWire(mistake) if mistake and mistake not in QUEUES else None
    device = OwnDevice(group, 1e-3 * group.rank, queue_class=QUEUES.get(mistake), wire_kernels=kernels)
    with opened(group, device, algorithm="direct") as comm:  # over rails a late network has a phase more
        got = _exchanges(comm, has_weights)
    device.end()
    with Communicator(group, **SIZES) as comm:
        wanted = _exchanges(comm, has_weights)
    return all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))


def _exchanges(comm, has_weights):
    seen = []
    for step in range(3):
        x, ids = random_rows((6, 24), torch.float32, f"{step} {comm.rank}"), masked(6, 6, 3, seed=5 * step + comm.rank)
        weights = torch.rand(6, 3, generator=torch.Generator().manual_seed(step)) if has_weights else None
        received = comm.dispatch(x, ids, weights)
        seen.append(received.x.clone())
        seen += [received.topk_weights.clone()] if has_weights else []
        seen.append(comm.combine(received.x, received.handle))
    return seen
