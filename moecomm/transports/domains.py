"""Domains: which ranks address each other's memory. The topology of a group is found from that, or held to it."""

from __future__ import annotations

from collections.abc import Sequence

from moecomm.topology import Topology
from moecomm.transports.peers import Peer
from moecomm.transports.registry import transport_class, transport_names

__all__ = ["check_topology", "far_ranks", "find_topology"]


def far_ranks(me: Peer, peers: Sequence[Peer]) -> list[int]:
    """The ranks whose memory no transport can address from here, ascending, as far as identities tell."""
    transports = [transport_class(name) for name in transport_names()]
    far = set(range(len(peers)))
    for transport in transports:
        capabilities = transport.capabilities
        if capabilities.addressable and me.device_type in capabilities.device_types:
            far -= {rank for rank, reason in enumerate(transport.probe(me, peers)) if reason is None}
    return sorted(far - {me.rank})


def find_topology(peers: Sequence[Peer], far_from: Sequence[Sequence[int]]) -> Topology:
    """The topology of a group.

    Arguments:
        peers: identities of all ranks, as `gather_peers` gives them; a host is one running kernel (or one
            MOECOMM_HOST_ID), whatever its name.
        far_from: per rank the ranks whose memory it cannot address. A domain consists of ranks that all address each
            other, both ways; a rank belongs to the first domain where it does.

    Returns:
        The same on every rank that is given the same.
    """
    far = [set(ranks) for ranks in far_from]

    def is_near(rank: int, members: list[int]) -> bool:
        return far[rank].isdisjoint(members) and all(rank not in far[member] for member in members)

    domains: list[list[int]] = []
    domain_of = []
    for rank in range(len(peers)):
        number = next((number for number, members in enumerate(domains) if is_near(rank, members)), len(domains))
        if number == len(domains):
            domains.append([])
        domains[number].append(rank)
        domain_of.append(number)
    hosts = {host: number for number, host in enumerate(dict.fromkeys(peer.host for peer in peers))}
    names = {peer.host: peer.hostname for peer in reversed(peers)}
    return Topology(tuple(hosts[peer.host] for peer in peers), tuple(domain_of), tuple(names[host] for host in hosts))


def check_topology(topology: Topology, peers: Sequence[Peer], far_from: Sequence[Sequence[int]]) -> None:
    """Holds a topology that somebody has given to what is.

    Ranks of different domains may well address each other: so a grid can be tried out on one host.

    Arguments:
        topology: of as many ranks as there are peers.
        peers, far_from: as for `find_topology`.

    Raises:
        ValueError: ranks of one domain do not address each other; the same on every rank that is given the same.
    """
    for rank, far in enumerate(far_from):
        for other in far:
            if topology.domain_of[rank] == topology.domain_of[other]:
                first, second = peers[min(rank, other)], peers[max(rank, other)]
                raise ValueError(
                    f"topology: rank {first.rank} (pid {first.pid} on {first.hostname}) and rank {second.rank} "
                    f"(pid {second.pid} on {second.hostname}) are in one domain, but do not address each other's memory"
                )
