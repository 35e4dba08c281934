"""Ranks on several hosts: which transport is taken for whom, and who is named when one is lost. The contract is held in
test_contracts.py.
"""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
from host_worlds import OnHosts, why_not_ucx

import moecomm
from moecomm.errors import PeerLost
from moecomm.testing import launch

pytestmark = pytest.mark.skipif(bool(why_not_ucx()), reason=f"no UCX: {why_not_ucx()}")


def who_is_far(group, name):
    with moecomm.Communicator(group, num_experts=5, hidden=8, num_topk=2, transport=name) as comm:
        x, idx = torch.ones(3, 8), torch.tensor([[0, 4]] * 3)
        received = comm.dispatch(x, idx)
        assert torch.equal(comm.combine(received.x, received.handle), 2 * x)
        return comm.transport_name, sorted(comm._exchanger.session.reach.far)


def test_auto_chooses_by_where_the_ranks_are():
    assert launch(OnHosts(who_is_far, 2), 2, "auto", backend="processes") == [("shm", [])] * 2
    uneven = launch(OnHosts(who_is_far, 2), 3, "auto", backend="processes")
    assert uneven == [("shm+ucx", [2]), ("shm+ucx", [2]), ("shm+ucx", [0, 1])]
    assert launch(OnHosts(who_is_far, 1), 2, "auto", backend="processes") == [("shm+ucx", [1]), ("shm+ucx", [0])]
    assert launch(OnHosts(who_is_far, 2), 2, "ucx", backend="processes") == [("ucx", [1]), ("ucx", [0])]


def lose(group, victim):
    """Everybody else learns who is missing, near or far."""
    comm = moecomm.Communicator(
        group, num_experts=4, hidden=8, num_topk=2, transport="shm+ucx", timeout=timedelta(seconds=20)
    )
    x, idx = torch.ones(3, 8), torch.tensor([[0, 3]] * 3)
    comm.dispatch(x, idx)
    if group.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(PeerLost) as found:
        comm.dispatch(x, idx)
    group_waits = time.monotonic() - start
    time.sleep(2)  # so that nobody takes this rank's goodbye for the loss
    comm.close()
    return found.value.peers, group_waits < 15


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_near_and_far(victim):
    told = launch(OnHosts(lose, 2), 3, victim, backend="processes", return_exceptions=True)
    for rank in range(3):
        if rank != victim:
            assert told[rank] == ((victim,), True), told[rank]
