"""Whole exchanges between hosts over real links: the same bits as `collective`, both modes, even and uneven grids; what
crosses the wire; a rank that is lost.
"""

import os
from pathlib import Path

import pytest
import torch
from exchange_ranks import Batch
from multi_host import RanksOnHosts

import moecomm
from moecomm.testing.compare import assert_bitwise_equal
from moecomm.testing.hosts import Hosts, why_not
from moecomm.transports.ucx_library import find_library

GRIDS = {"2 x 1": (1, 1), "2 x 2": (2, 2), "2 + 1": (2, 1), "3 x 2": (2, 2, 2)}


@pytest.fixture(scope="module", params=GRIDS.values(), ids=GRIDS)
def ranks(request):
    reason = find_library().problem or why_not()
    if reason:
        pytest.skip(reason)
    with Hosts(request.param) as hosts, RanksOnHosts(hosts, "auto") as made:
        yield made


def exchange(group, transport):
    """Every way of moving rows, beside torch's own exchange."""
    batches = [Batch(group.size, seed, torch.bfloat16) for seed in range(6)]
    options = {"num_experts": 7, "hidden": batches[0].x(0).shape[1], "num_topk": 3, "max_tokens_per_rank": 8}
    with (
        moecomm.Communicator(group, transport=transport, **options) as comm,
        moecomm.Communicator(group, transport="collective", **options) as other,
    ):
        for batch in batches:
            weights = batch.topk_weights(comm.rank)
            for how in ({}, {"layout": "flat"}, {"mode": "low_latency"}):
                received, wanted = batch.send(comm, **how), batch.send(other, **how)
                assert_bitwise_equal(received.x, wanted.x, f"dispatch {how}")
                sent = None if "layout" in how else weights
                got = comm.combine(received.x * 2, received.handle, sent)
                assert_bitwise_equal(got, other.combine(wanted.x * 2, wanted.handle, sent), f"combine {how}")
        return comm.transport_name, len(comm._exchanger.session.reach.far)


def test_the_same_bits_as_the_collective_exchange(ranks):
    told = ranks.run(exchange, ranks.several)
    there = [ranks.hosts.host_of.count(host) for host in ranks.hosts.host_of]
    assert told == [("shm+ucx", len(ranks.hosts.host_of) - near) for near in there]


def sent_bytes():
    """Bytes that have left this host."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def count_bytes(group, transport):
    """Bytes on the wire of a dispatch of large rows to one rank of the other host, and those of the rows."""
    num_tokens, hidden = 256, 4096
    with moecomm.Communicator(group, num_experts=group.size, hidden=hidden, num_topk=1, transport=transport) as comm:
        x = torch.zeros(num_tokens if comm.rank == 0 else 0, hidden)
        idx = torch.full((x.shape[0], 1), group.size - 1)
        comm.dispatch(x[:1], idx[:1])
        group.all_gather(None)
        before = sent_bytes()
        comm.dispatch(x, idx)
        group.all_gather(None)
        return sent_bytes() - before, x.nbytes


def test_rows_cross_the_wire_once(ranks):
    on_wire, rows = ranks.run(count_bytes, ranks.several)[0]
    assert rows <= on_wire < 1.05 * rows


def count_low_latency_bytes(group, transport):
    """Bytes on the wire of a low-latency dispatch whose tokens choose an expert of each rank, and those of rows that
    must cross."""
    num_tokens, hidden = 32, 8192
    options = {"num_experts": group.size, "hidden": hidden, "num_topk": group.size, "max_tokens_per_rank": num_tokens}
    with moecomm.Communicator(group, transport=transport, **options) as comm:
        x = torch.ones(num_tokens if comm.rank == 0 else 0, hidden)
        idx = torch.arange(group.size).expand(x.shape[0], group.size).contiguous()
        for _ in range(2):
            received = comm.dispatch(x, idx, mode="low_latency")
            assert int(received.num_tokens_per_expert.sum()) == num_tokens
        group.all_gather(None)
        before, counted = sent_bytes(), comm.stats["bytes_between_hosts"]
        comm.dispatch(x, idx, mode="low_latency")
        group.all_gather(None)
        counted = comm.stats["bytes_between_hosts"] - counted
        return sent_bytes() - before, counted, x.nbytes * (comm.topology.num_domains - 1)


def test_rows_of_low_latency_calls_cross_once_per_host(ranks):
    on_wire, counted, rows = ranks.run(count_low_latency_bytes, ranks.several)[0]
    assert rows <= counted <= on_wire < 1.05 * rows


def lose(group, transport):
    comm = moecomm.Communicator(group, num_experts=group.size, hidden=8, num_topk=1, transport=transport)
    x, idx = torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int64)
    comm.dispatch(x, idx)
    if comm.rank == group.size - 1:
        os._exit(9)
    with pytest.raises(moecomm.PeerLost) as found:
        comm.dispatch(x, idx)
    comm.close()
    return found.value.peers


def test_a_lost_rank_is_named_across_hosts(ranks):
    told = ranks.run(lose, ranks.several, return_exceptions=True)
    assert all(ranks.several - 1 in peers for peers in told[:-1]), told
