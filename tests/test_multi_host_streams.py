"""Streams between hosts over real links: a rank that is killed, a link that is down for a second, in their middle."""

import os
import signal
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
from exchange_ranks import caught, left_behind
from multi_host import RanksOnHosts, begun
from stream_ends import CUTS, die, when_taking
from tiny_rings import tiny_rings

import moecomm
from moecomm.testing import reference_combine, reference_dispatch
from moecomm.testing.compare import assert_bitwise_equal
from moecomm.testing.failures import RankDied
from moecomm.testing.hosts import Hosts, why_not
from moecomm.transports.ucx_library import find_library

NUM_RANKS = 4
VICTIM = 3
DEADLINE = 20.0


@pytest.fixture(scope="module")
def ranks():
    reason = find_library().problem or why_not(limits=True)
    if reason:
        pytest.skip(reason)
    with Hosts((2, 2), rate="100mbit") as hosts, RanksOnHosts(hosts, "auto") as made:
        yield made


def open_communicator(group, transport, hidden, seconds=DEADLINE):
    return moecomm.Communicator(
        group,
        num_experts=group.size,
        hidden=hidden,
        num_topk=group.size,
        transport=transport,
        algorithm="hierarchical",
        timeout=timedelta(seconds=seconds),
    )


# -- a rank that is killed ---------------------------------------------------------------------------------------------


def exchange(comm, reduce="exact"):
    """Rows from everybody to everybody, many chunks of them, and home again."""
    x = torch.full((20, comm.hidden), 1.0 + comm.rank)
    received = comm.dispatch(x, torch.arange(comm.num_ranks).expand(20, -1).contiguous())
    assert received.x[:, 0].tolist() == [1.0 + source for source in range(comm.num_ranks) for _ in range(20)]
    out = comm.combine(received.x, received.handle, reduce=reduce)
    assert torch.equal(out, x * comm.num_ranks)


def exchange_until_it_fails(group, transport, cut, number, reduce):
    """What the failure says, after how many seconds, and what is left of the communicator then."""
    with tiny_rings():
        comm = open_communicator(group, transport, 16)
        exchange(comm, reduce)
        if group.rank == VICTIM:
            CUTS[cut](comm, number, die)
        begin = time.monotonic()
        found = caught(partial(exchange, comm, reduce))
        if found[0] == "nothing":  # it had all its rows and answers before
            found = caught(partial(exchange, comm, reduce))
        seconds = time.monotonic() - begin
        comm.close()  # needs no peer
    del comm
    return found, seconds, left_behind()


# Of a dispatch, each rank's rails take 10 chunks from it; the combine's follow.
@pytest.mark.parametrize("number", [4, 14], ids=["dispatch", "combine"])
@pytest.mark.parametrize("cut", CUTS)
def test_a_rank_killed_in_the_middle_of_a_stream_is_named(ranks, cut, number):
    number = {"receiver": number // 4}.get(cut, number)
    told = ranks.run(exchange_until_it_fails, NUM_RANKS, cut, number, "per_host", return_exceptions=True, timeout=60)
    assert isinstance(told[VICTIM], RankDied), told
    names = set()
    for rank in range(VICTIM):
        assert not isinstance(told[rank], Exception), told[rank]
        (name, text, peers), seconds, left = told[rank]
        names.add((name, peers))
        # Who hears of it from a rank that gave up reads there who is gone.
        assert name in ("PeerLost", "PeerFailed"), f"rank {rank}: {name}: {text}"
        assert f"rank {VICTIM}" in text, f"rank {rank}: {text}"
        assert seconds < DEADLINE, f"rank {rank}: {text}"
        assert not left
    assert ("PeerLost", (VICTIM,)) in names, told
    assert told[VICTIM].exitcode == -signal.SIGKILL
    assert [name for name in os.listdir("/dev/shm") if "moecomm" in name] == []
    assert [ranks.hosts.processes(host) for host in range(2)] == [[], []]  # the others have been ended by `run`


# -- a link that is down for a second ----------------------------------------------------------------------------------

TOKENS, HIDDEN = 400, 1024


def inputs(rank):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    return x, torch.stack([torch.randperm(NUM_RANKS, generator=generator) for _ in range(TOKENS)])


def exchange_through_an_outage(group, transport, part):
    """When the interrupted call ended; its bits are checked here."""
    everything = [inputs(rank) for rank in range(group.size)]
    xs, idx = [x for x, _ in everything], [ids for _, ids in everything]
    wanted = [reference_dispatch(xs, idx, None, num_experts=group.size, rank=rank).x for rank in range(group.size)]
    home = reference_combine(wanted, idx, num_experts=group.size, rank=group.rank)
    with open_communicator(group, transport, HIDDEN) as comm:
        small = comm.dispatch(*[one[:4] for one in everything[group.rank]])
        comm.combine(small.x, small.handle)
        if part == "dispatch":
            when_taking(comm, 1, begun)
        received = comm.dispatch(xs[group.rank], idx[group.rank])
        ended = time.monotonic()
        if part == "combine":
            when_taking(comm, 1, begun)
        out = comm.combine(received.x, received.handle)
        ended = ended if part == "dispatch" else time.monotonic()
        assert_bitwise_equal(received.x, wanted[group.rank], f"rank {group.rank}: dispatch")
        assert_bitwise_equal(out, home, f"rank {group.rank}: combine")
        return ended


@pytest.mark.parametrize("part", ["dispatch", "combine"])
def test_a_link_that_is_down_for_a_second_is_survived_in_the_middle_of_a_stream(ranks, part):
    back = []

    def outage():
        ranks.hosts.unplug(1)
        time.sleep(1.0)
        back.append(time.monotonic())
        ranks.hosts.plug(1)

    ended = ranks.run(exchange_through_an_outage, NUM_RANKS, part, meanwhile=outage, timeout=60)
    assert max(ended) > back[0], "it was over before the outage was"


def stream_into_a_cut(group, transport, seconds):
    """A dispatch of far more than may be under way at once, while the link goes down: what it says, and when."""
    x, idx = torch.zeros(24_000, HIDDEN), (torch.arange(24_000) + group.rank)[:, None] % group.size
    with open_communicator(group, transport, HIDDEN, seconds) as comm:
        small = comm.dispatch(x[:4], idx[:4])
        when_taking(comm, 1, begun)
        found = caught(lambda: comm.dispatch(x, idx))
        ended = time.monotonic()
        del small
    return found, ended


def test_a_link_that_goes_down_in_the_middle_of_a_stream_ends_it_in_time(ranks):
    """Also those that wait for a peer to take in what they send."""
    cut = []

    def unplug():
        ranks.hosts.unplug(1)
        cut.append(time.monotonic())

    try:
        told = ranks.run(stream_into_a_cut, NUM_RANKS, 2.0, meanwhile=unplug, timeout=60)
    finally:
        ranks.hosts.plug(1)
        ranks.stop()  # the ranks' group has lost its connections, too
    for rank, ((name, text, peers), ended) in enumerate(told):
        assert name in ("PeerTimeout", "PeerFailed"), f"rank {rank}: {name}: {text}"
        assert peers, f"rank {rank}: {text}"
        assert ended - cut[0] < DEADLINE, f"rank {rank}: {text}"
