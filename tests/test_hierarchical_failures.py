"""Failures between domains: refused calls, too little memory, differing calls, early chunks for nothing; what follows
is right, and nothing is left behind.
"""

import random

import pytest
import torch
from exchange_ranks import HIDDEN, Batch, caught, in_one_thread
from far_transports import PATHS
from hierarchical_cases import GRIDS, mixed_calls
from interleavings import receive_all, run_at_random
from tiny_rings import tiny_rings

from moecomm import Topology
from moecomm.transports import registry

LIMIT = 1 << 19


@pytest.fixture(autouse=True)
def known_transports(monkeypatch):
    """Registered for these tests alone: others look at all that are."""
    for name, path in PATHS.items():
        monkeypatch.setitem(registry._known, name, path)


class Refused:
    """Stands for a call that its arguments did not allow; peers that wait for it are told."""

    def __init__(self, call):
        self.name, self.text, _ = caught(call)

    def wait(self):
        raise ValueError(self.text)


def refused_on(culprit, batch):
    """A dispatch that one rank's arguments do not allow."""

    def begin(comm):
        if comm.rank == culprit:
            return Refused(lambda: comm.dispatch_async(batch.x(comm.rank)[:, 1:], batch.topk_idx(comm.rank)))
        return batch.send(comm, "dispatch_async")

    def check(work, rank):
        name, text, peers = caught(work.wait)
        if rank == culprit:
            assert name == "ValueError"
        else:
            assert (name, peers) == ("PeerFailed", (culprit,)), text

    return begin, check


def too_much():
    """A dispatch whose rows do not fit into the memory of the rank to which all go."""
    num_rows = LIMIT // (4 * HIDDEN) + 1

    def begin(comm):
        return comm.dispatch_async(torch.zeros(num_rows, HIDDEN), torch.zeros(num_rows, 1, dtype=torch.int64))

    def check(work, rank):
        name, text, _ = caught(work.wait)
        assert name == "MemoryLimitExceeded", text
        assert "rank 0" in text

    return begin, check


def differing(batch, culprit):
    """Calls that are not the same: another layout on one rank."""

    def begin(comm):
        return batch.send(comm, "dispatch_async", layout="flat" if comm.rank == culprit else "expert_major")

    def check(work, rank):
        name, text, _ = caught(work.wait)
        assert name == "CallMismatch", text

    return begin, check


def differing_reduce(received, culprit):
    def begin(comm):
        one = received[comm.rank]
        return comm.combine_async(one.x, one.handle, reduce="per_host" if comm.rank == culprit else "exact")

    def check(work, rank):
        name, text, _ = caught(work.wait)
        assert name == "CallMismatch", text
        assert "reduce=per_host" in text

    return begin, check


def for_nothing(number):
    """A dispatch that goes from rank to rank under `auto`: but for one rank's, which expects rails and may send early,
    each token has one expert, so rails would only add bytes.
    """

    def begin(comm):
        batch = Batch(comm.num_ranks, number)
        idx = batch.topk_idx(comm.rank).clone()
        if comm.rank != number % comm.num_ranks:
            idx[:, 1] = -1
        return comm.dispatch_async(batch.x(comm.rank), idx)

    return begin, lambda work, rank: work.wait()


def checked(call, check):
    return call, lambda work, rank: check(work.wait(), rank)


def run(comms, seed):
    numbers = random.Random(seed)
    num_ranks = len(comms)
    earlier = Batch(num_ranks, seed)
    received = receive_all(comms, earlier)
    right = [checked(*one) for one in mixed_calls(comms, 10 * seed)]
    calls = []
    for number in range(16):
        culprit = numbers.randrange(num_ranks)
        wrong = [
            lambda number=number, culprit=culprit: refused_on(culprit, Batch(num_ranks, number)),
            too_much,
            lambda number=number, culprit=culprit: differing(Batch(num_ranks, number), culprit),
            lambda culprit=culprit: differing_reduce(received, culprit),
            lambda number=number: for_nothing(number),
        ]
        calls.append(numbers.choice(wrong)() if numbers.random() < 0.6 else numbers.choice(right))
    works = run_at_random(comms, [call for call, _ in calls + right], numbers)
    for rank, own in enumerate(works):
        for work, (_, check) in zip(own, calls + right, strict=True):
            check(work, rank)
    for comm in comms:
        comm.trim()


@pytest.mark.parametrize("algorithm", ["hierarchical", "auto"])
@pytest.mark.parametrize(
    ("transport", "topology"),
    [*(("local", grid) for grid in GRIDS), ("pairs-local", None), ("far-local", None)],
    ids=lambda value: str(value.domain_of) if isinstance(value, Topology) else str(value),
)
def test_failures_among_calls_in_flight(transport, topology, algorithm):
    num_ranks = 4 if topology is None else topology.num_ranks
    options = {"transport": transport, "topology": topology, "algorithm": algorithm, "max_in_flight": 3}
    with tiny_rings(), in_one_thread(num_ranks, memory_limit=LIMIT, **options) as comms:
        for seed in range(3):
            run(comms, seed)
        for comm in comms:
            assert comm.stats["receive_blocks_alive"] == 0
            assert not comm._exchanger.session.sequencer._quarantine
