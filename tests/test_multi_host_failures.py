"""Whole exchanges between hosts when links or hosts fail, and what is left behind."""

import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from multi_host import RanksOnHosts, begun

import moecomm
from moecomm.testing.failures import RankDied
from moecomm.testing.hosts import Hosts, ip, why_not
from moecomm.transports.ucx_library import find_library

ENOUGH = 10  # rounds before something may fail


@pytest.fixture(scope="module")
def ranks():
    reason = find_library().problem or why_not()
    if reason:
        pytest.skip(reason)
    with Hosts((2, 2)) as hosts, RanksOnHosts(hosts, "auto") as made:
        yield made


class Rounds:
    """Exchanges in which every rank sends one row to every rank: whether it goes on, from whom, in which round."""

    def __init__(self, comm):
        self.comm = comm
        self.topk_idx = torch.arange(comm.num_ranks).view(1, -1)
        self.number = 0

    def exchange(self, is_last=False):
        """One round; whether rank 0 has said that it is the last."""
        comm, self.number = self.comm, self.number + 1
        if self.number == ENOUGH:
            begun()
        x = torch.tensor([[float(is_last), comm.rank, self.number]])
        received = comm.dispatch(x, self.topk_idx)
        said = received.x.clone()
        assert said[:, 1].tolist() == list(range(comm.num_ranks))
        assert set(said[:, 2].tolist()) == {self.number}
        out = comm.combine(received.x, received.handle)
        assert torch.equal(out, x * comm.num_ranks)
        return bool(said[0, 0])

    def go_on(self):
        """Rounds without end."""
        while True:
            self.exchange()


def communicator(group, transport, seconds):
    return moecomm.Communicator(
        group,
        num_experts=group.size,
        hidden=3,
        num_topk=group.size,
        transport=transport,
        timeout=timedelta(seconds=seconds),
    )


def exchange_until_told(group, transport, seconds):
    """The longest round."""
    with communicator(group, transport, 20) as comm:
        rounds, longest = Rounds(comm), 0.0
        end, is_over = time.monotonic() + seconds, False
        while not is_over:
            begin = time.monotonic()
            is_over = rounds.exchange(is_last=group.rank == 0 and begin > end)
            longest = max(longest, time.monotonic() - begin)
        return longest


def test_exchanges_survive_a_link_that_is_down_for_a_second(ranks):
    def outage():
        ranks.hosts.unplug(1)
        time.sleep(1.0)
        ranks.hosts.plug(1)

    longest = ranks.run(exchange_until_told, 4, 1.5, meanwhile=outage)
    # That long at least no round can have ended.
    assert min(longest) > 0.5, f"the outage was not seen: {longest}"


def exchange_until_it_fails(group, transport, error, seconds):
    """Whom the error names, and the memory that is still mapped behind it."""
    comm = communicator(group, transport, seconds)
    rounds = Rounds(comm)
    assert mapped_memory()
    with pytest.raises(error) as found:
        rounds.go_on()
    peers = found.value.peers
    comm.close()  # needs no peer
    del rounds, comm, found
    return sorted(peers), mapped_memory()


def mapped_memory():
    """Shared memory of ours that this process has mapped."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:moecomm" in line]


def test_a_link_that_stays_down_is_an_error_that_names_ranks_behind_it(ranks):
    # Of two ranks of a host the one that gives up first tells the other, also on whose account. The wire may notice
    # before both, if it has just asked for the other host's address.
    errors = moecomm.PeerTimeout, moecomm.PeerFailed, moecomm.PeerLost
    try:
        how = {"meanwhile": lambda: ranks.hosts.unplug(1), "timeout": 30.0}  # far less than a wire takes to give up
        told = ranks.run(exchange_until_it_fails, 4, errors, 2.0, **how)
    finally:
        ranks.hosts.plug(1)
        ranks.stop()  # the ranks' group has lost its connections, too
    for rank, (peers, mapped) in enumerate(told):
        assert set(peers) & ({2, 3} if rank < 2 else {0, 1}), told
        assert not mapped


def test_a_host_whose_processes_are_killed_is_named(ranks):
    told = ranks.run(
        *(exchange_until_it_fails, 4, moecomm.PeerLost, 20.0),
        meanwhile=lambda: ranks.hosts.kill(1),
        return_exceptions=True,
    )
    for peers, mapped in told[:2]:
        assert peers, told
        assert set(peers) <= {2, 3}, told
        assert not mapped
    assert all(isinstance(answer, RankDied) for answer in told[2:]), told
    assert ranks.hosts.processes(1) == []


def test_nothing_is_left_of_hosts():
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Hosts((1, 1)) as hosts:
        inside = hosts.start(1, ["sh", "-c", "sleep 60 & sleep 60"])
        while len(hosts.processes(1)) < 3:
            time.sleep(0.01)
        pids = hosts.processes(1)
    assert inside.wait(timeout=10) != 0
    assert hosts.namespace(0).rsplit("-", 1)[0] not in ip("netns", "list")
    deadline = time.monotonic() + 10
    while any(Path("/proc", str(pid)).exists() for pid in pids):
        assert time.monotonic() < deadline, subprocess.check_output(["ps", "-ef"], text=True)
        time.sleep(0.01)


def test_limited_links_are_limited():
    reason = why_not(limits=True)
    if reason:
        pytest.skip(reason)
    with Hosts((1, 1), rate="10mbit") as hosts:
        listing = ["tc", "-n", hosts.namespace(0), "qdisc", "show", "dev", "eth0"]
        assert "rate 10Mbit" in subprocess.check_output(listing, text=True)
        hosts.limit(None)
        assert "tbf" not in subprocess.check_output(listing, text=True)
        hosts.limit("20mbit")
        assert "rate 20Mbit" in subprocess.check_output(listing, text=True)
