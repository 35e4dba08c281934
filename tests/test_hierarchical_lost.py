"""Ranks that die or stop in the middle of a stream between domains: who is named, and how it goes on."""

import threading
from datetime import timedelta
from functools import partial

import pytest
import torch
from exchange_ranks import HIDDEN, caught, check_exchange, left_behind, open_communicator
from stream_ends import die, when_taking
from tiny_rings import tiny_rings

from moecomm import Topology
from moecomm.testing import launch
from moecomm.testing.failures import RankDied

GRID = Topology.grid(2, 2)
VICTIM = 3


def everybody_to_everybody(comm):
    """Rows for each expert from each token: every channel is in use for many chunks."""
    x = torch.full((20, HIDDEN), float(comm.rank))
    return comm.dispatch(x, torch.tensor([[0, 3]] if comm.rank >= 2 else [[3, 5]]).expand(20, 2).contiguous())


def call(comm, received, operation):
    """The call that fails."""
    if operation == "dispatch":
        everybody_to_everybody(comm)
    elif operation == "cached dispatch":
        comm.dispatch(torch.zeros(20, HIDDEN), handle=received.handle)
    else:
        comm.combine(received.x, received.handle, reduce=operation)


def lose_a_rank(group, operation):
    with tiny_rings():
        comm = open_communicator(group, topology=GRID, algorithm="hierarchical")
        received = everybody_to_everybody(comm)
        if group.rank == VICTIM:
            when_taking(comm, 3, die)
        found = caught(partial(call, comm, received, operation))
        comm.close()
    del received, comm
    return found, left_behind()


@pytest.mark.parametrize("operation", ["dispatch", "cached dispatch", "exact", "per_host"])
def test_a_rank_killed_while_others_stream_is_named(operation):
    answers = launch(lose_a_rank, 4, operation, backend="processes", timeout=30, return_exceptions=True)
    assert isinstance(answers[VICTIM], RankDied)
    for rank in range(VICTIM):
        (name, text, peers), left = answers[rank]
        assert (name, peers) == ("PeerLost", (VICTIM,)), f"rank {rank}: {name}: {text}"
        assert not left


def stop_for_a_while(group, told, operation):
    """Rank 2 stops in the middle of its stream until the others have given up; then all go on."""
    slow = group.rank == 2
    timeout = timedelta(seconds={0: 0.5, 2: 20}.get(group.rank, 1.5))
    with open_communicator(group, topology=GRID, algorithm="hierarchical", timeout=timeout) as comm:
        told.wait(20)
        received = everybody_to_everybody(comm)
        told.wait(20)
        if slow:
            when_taking(comm, 3, lambda: told.wait(20))
        found = caught(partial(call, comm, received, operation))
        if not slow:
            told.wait(20)
        for seed in range(3):
            told.wait(20)
            check_exchange(comm, seed)
        del received
        stats = comm.stats
        comm._exchanger.session.sequencer.release_quarantine()
        assert comm.stats["receive_blocks_alive"] == 0, stats
        told.wait(20)
        return found


@pytest.mark.parametrize("operation", ["dispatch", "exact", "per_host"])
def test_a_rail_that_stops_is_named_and_may_come_back(operation):
    with tiny_rings():
        answers = launch(stop_for_a_while, 4, threading.Barrier(4), operation, backend="threads", timeout=60)
    name, text, peers = answers[0]
    assert (name, peers) == ("PeerTimeout", (2,)), text  # its rail
    assert "waited 0.5 s for rows, or for room for rows" in text
    for rank in (1, 3):
        name, text, peers = answers[rank]
        assert name in ("PeerTimeout", "PeerFailed"), text
        assert "rank 2" in text
    assert answers[2][0] == "PeerFailed"
