"""Hosts with two networks: UCX takes the one that its variables name, which speaks IPv6 only; gloo keeps the other."""

from pathlib import Path

import pytest
import torch
from multi_host import RanksOnHosts

import moecomm
from moecomm.testing.compare import assert_bitwise_equal
from moecomm.testing.hosts import Hosts, ip, why_not
from moecomm.transports.ucx_library import find_library


@pytest.fixture
def hosts():
    reason = find_library().problem or why_not()
    if reason:
        pytest.skip(reason)
    with Hosts((1, 1)) as made:
        first, second = made.namespace(0), made.namespace(1)
        ip("-n", first, "link", "add", "eth1", "type", "veth", "peer", "name", "eth1", "netns", second)
        for host, name in enumerate((first, second)):
            ip("-n", name, "address", "add", f"fd77::{host + 1}/64", "dev", "eth1", "nodad")
            ip("-n", name, "link", "set", "eth1", "up")
        yield made


def sent_bytes(interface):
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def count(group, transport):
    """Bytes on either network of a dispatch of rows to the other host, and those of the rows."""
    with moecomm.Communicator(group, num_experts=2, hidden=4096, num_topk=1, transport=transport) as comm:
        x = torch.arange(64.0)[:, None].expand(64, 4096)
        idx = torch.full((64, 1), 1 - comm.rank)
        comm.dispatch(x[:1], idx[:1])
        group.all_gather(None)
        before = [sent_bytes(interface) for interface in ("eth0", "eth1")]
        received = comm.dispatch(x, idx)
        assert_bitwise_equal(received.x, x, "dispatch")
        group.all_gather(None)
        return [sent_bytes(interface) - count for interface, count in zip(("eth0", "eth1"), before, strict=True)]


@pytest.mark.parametrize("transport", ["auto", "ucx"])
def test_rows_take_the_network_that_ucx_is_told(hosts, transport, monkeypatch):
    monkeypatch.setenv("UCX_NET_DEVICES", "eth1")
    monkeypatch.setenv("UCX_AF_PRIO", "inet6")
    with RanksOnHosts(hosts, transport) as ranks:
        for eth0, eth1 in ranks.run(count, 2):
            assert eth1 >= 64 * 4096 * 4
            assert eth0 < 64 * 4096
