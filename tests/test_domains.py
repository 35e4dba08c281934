"""The topology of a group: found from who addresses whom, or given and held to it."""

import os

import pytest
import torch
from exchange_ranks import HIDDEN, check_exchange, open_communicator
from far_transports import PATHS
from host_worlds import OnHosts, why_not_ucx

from moecomm import SoloGroup, Topology
from moecomm.testing import launch
from moecomm.transports import registry
from moecomm.transports.domains import check_topology, far_ranks, find_topology
from moecomm.transports.peers import Peer

needs_ucx = pytest.mark.skipif(bool(why_not_ucx()), reason=f"no UCX: {why_not_ucx()}")


@pytest.fixture(autouse=True)
def known_transports(monkeypatch):
    """Registered for these tests alone: others look at all that are."""
    for name, path in PATHS.items():
        monkeypatch.setitem(registry._known, name, path)


def peer(rank, host="kernel", hostname="node", namespace="pid:1", uid=0, process=None, in_process=False):
    """A rank as it would say who it is; a process of its own unless `process` names one."""
    return Peer(rank, 100 + rank, process or f"p{rank}", host, namespace, uid, hostname, "cpu", in_process)


def found(peers):
    return find_topology(peers, [far_ranks(me, peers) for me in peers])


# -- found from identities -------------------------------------------------------------------------------------------


def test_hosts_are_kernels_whatever_their_names():
    peers = [peer(0, "a"), peer(1, "b"), peer(2, "a"), peer(3, "b", hostname="other")]
    topology = found(peers)
    assert topology == Topology((0, 1, 0, 1), (0, 1, 0, 1))
    assert topology.host_names == ("node", "node")  # of each host's first rank


def test_containers_of_one_host_are_domains_of_their_own():
    peers = [peer(rank, namespace=f"pid:{rank // 2}") for rank in range(4)]
    assert found(peers) == Topology((0, 0, 0, 0), (0, 0, 1, 1))


def test_memory_that_only_one_side_can_open_joins_nobody():
    assert found([peer(0, uid=0), peer(1, uid=7), peer(2, uid=7)]) == Topology((0, 0, 0), (0, 1, 1))


def test_threads_of_one_process_are_one_domain():
    threads = [peer(rank, process="p", in_process=True) for rank in range(3)]
    assert found(threads) == Topology.grid(3)
    beside = [peer(rank, process="p") for rank in range(2)]  # of a group over torch.distributed: no common board
    assert found(beside) == Topology((0, 0), (0, 1))


def test_all_members_of_a_domain_address_each_other():
    peers = [peer(rank) for rank in range(4)]
    chain = [[2, 3], [3], [0], [0, 1]]  # 0-1, 1-2, 2-3 only
    assert find_topology(peers, chain).domain_of == (0, 0, 1, 1)
    one_way = [[], [0], []]
    assert find_topology(peers[:3], one_way).domain_of == (0, 1, 0)


def test_a_domain_may_span_hosts():
    peers = [peer(rank, f"host{rank // 4}") for rank in range(72)]
    assert find_topology(peers, [[]] * 72) == Topology.of_domains(72, ranks_per_host=4)


def test_what_is_given_is_held_to_what_is():
    peers = [peer(0), peer(1), peer(2, "b", "elsewhere")]
    far_from = [far_ranks(me, peers) for me in peers]
    for holds in (Topology.grid(2, 1), Topology.grid(1, 1, 1), Topology((0, 0, 0), (0, 1, 2))):
        check_topology(holds, peers, far_from)
    for wrong in (Topology.grid(3), Topology((0, 1, 2), (0, 1, 0))):
        with pytest.raises(
            ValueError, match=r"rank 0 \(pid 100 on node\) and rank 2 \(pid 102 on elsewhere\) are in one"
        ):
            check_topology(wrong, peers, far_from)


# -- of communicators ------------------------------------------------------------------------------------------------


def exchange_and_tell(group, transport, topology):
    with open_communicator(group, transport=transport, topology=topology) as comm:
        check_exchange(comm, 1)
        return comm.topology


def told(num_ranks, transport="auto", topology=None, per_host=None, backend="processes"):
    """The topology that all ranks tell."""
    function = exchange_and_tell if per_host is None else OnHosts(exchange_and_tell, per_host)
    answers = launch(function, num_ranks, transport, topology, backend=backend)
    assert len(set(answers)) == 1
    return answers[0]


def test_one_rank_alone():
    assert exchange_and_tell(SoloGroup(), "auto", None) == Topology.grid(1)


def test_ranks_of_one_host_are_one_domain():
    assert told(3, backend="threads") == Topology.grid(3)
    processes = told(2)
    assert processes == Topology.grid(2)
    assert processes.host_names == (os.uname().nodename,)


@needs_ucx
def test_ranks_of_several_hosts():
    assert told(4, per_host=2) == Topology.grid(2, 2)
    assert told(4, per_host=3) == Topology.grid(3, 1)


@needs_ucx
def test_over_a_wire_alone_each_rank_is_its_own_domain():
    assert told(2, transport="ucx") == Topology((0, 0), (0, 1))


def test_domains_are_those_of_the_transport_in_use():
    assert told(4, transport="pairs-local", backend="threads") == Topology((0, 0, 0, 0), (0, 0, 1, 1))
    assert told(3, transport="far-local", backend="threads") == Topology((0, 0, 0), (0, 1, 2))


def test_without_a_transport_domains_are_what_memory_allows():
    assert told(2, transport="collective") == Topology.grid(2)
    assert told(3, transport="collective", per_host=2) == Topology.grid(2, 1)


@pytest.mark.parametrize(
    "grid", [Topology.grid(2, 2), Topology.grid(3, 1), Topology((0, 1, 0, 1), (0, 1, 0, 1))], ids=repr
)
def test_any_grid_can_be_tried_on_one_host(grid):
    assert told(4, topology=grid, backend="threads") is grid
    assert told(4, topology=grid) == grid


def tell_of_sums_per_host(group, algorithm):
    with open_communicator(group, topology=Topology.grid(2, 2), algorithm=algorithm) as comm:
        received = comm.dispatch(torch.ones(1, comm.hidden), torch.tensor([[0, 5]]))
        comm.combine(received.x, received.handle, reduce="per_host")
        return comm.explain()


@pytest.mark.parametrize(("algorithm", "why"), [("direct", " as reduce='per_host' always goes"), ("hierarchical", "")])
def test_what_sums_per_host_say_of_their_way(algorithm, why):
    text = launch(tell_of_sums_per_host, 4, algorithm)[0]
    # Each of four tokens crosses once; rails pass on as many rows, and read as many.
    inside = f" B between domains and {4 * 4 * HIDDEN} B inside them, all ranks together; from rank to rank it would"
    assert text.count(inside) == (1 if why else 2)
    assert f"combine #1: over rails{why}, " in text
    assert f"dispatch #0: {'from rank to rank' if why else 'over rails'}, " in text


# -- refused ---------------------------------------------------------------------------------------------------------


def refused(group, transport, topologies):
    with pytest.raises(ValueError, match="topology") as error:
        open_communicator(group, transport=transport, topology=topologies[group.rank])
    with open_communicator(group, transport=transport) as comm:  # what was refused left nothing behind
        check_exchange(comm, 1)
    return str(error.value)


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_all_ranks_refuse_a_topology_that_does_not_hold(backend):
    for text in launch(refused, 3, "auto", [Topology.grid(2, 2)] * 3, backend=backend):
        assert text == "topology is of 4 ranks, the group has 3"
    for differing in ([None, Topology.grid(2), None], [Topology.grid(1, 1)] * 2 + [Topology((0, 0), (0, 1))]):
        for rank, text in enumerate(launch(refused, 3, "auto", differing, backend=backend)):
            assert text.startswith(f"topology must be equal on all ranks: rank {rank} has")
            assert "as found" in text or "hosts (0, 0), domains (0, 1)" in text


def test_ranks_of_one_domain_must_address_each_other():
    for text in launch(refused, 4, "pairs-local", [Topology.grid(1, 3)] * 4):
        assert "rank 1 (pid" in text
        assert "and rank 2 (pid" in text
        assert text.endswith("are in one domain, but do not address each other's memory")
    for text in launch(OnHosts(refused, 1), 2, "collective", [Topology.grid(2)] * 2, backend="processes"):
        assert "rank 0 (pid" in text
        assert "and rank 1 (pid" in text


@pytest.mark.parametrize("wrong", [(2, 2), "grid", 2, torch.zeros(2)])
def test_what_is_no_topology_is_refused(wrong):
    with pytest.raises(TypeError, match=f"topology must be a moecomm.Topology or None, got {type(wrong).__name__}"):
        open_communicator(None, topology=wrong)
