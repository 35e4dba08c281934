"""Chooses transport and algorithms for a group, and checks that its ranks agree on what they construct."""

from __future__ import annotations

import logging

from moecomm.algorithms.base import Algorithm, Session
from moecomm.algorithms.calls import NUM_LANES
from moecomm.algorithms.captured import Captured
from moecomm.algorithms.collective import Collective
from moecomm.algorithms.device_hierarchical import DeviceHierarchical
from moecomm.algorithms.eager import Eager
from moecomm.algorithms.eager_sizes import EagerSizes
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.hierarchical import Hierarchical
from moecomm.algorithms.hops import WAYS, Hops, Way
from moecomm.algorithms.rendezvous import Rendezvous
from moecomm.algorithms.static import Static
from moecomm.devices.base import Device
from moecomm.errors import TransportUnavailable
from moecomm.groups import Group
from moecomm.placement import Placement
from moecomm.topology import Topology
from moecomm.transports.domains import check_topology, far_ranks, find_topology
from moecomm.transports.peers import gather_peers
from moecomm.transports.registry import choose_together, transport_names

__all__ = ["exchange_names", "make_session"]

_log = logging.getLogger("moecomm.algorithms")

_PAGE = 4096
_FIXED_BLOCKS = 64
# An x86-64 process has 2**47 bytes of address space; a quarter of it is for everybody's blocks of fixed shape.
_MAPPABLE_BYTES = 2**45


def exchange_names() -> list[str]:
    """What `Communicator(transport=...)` accepts."""
    return ["auto", *transport_names(), Collective.name]


def make_session(
    group: Group,
    placement: Placement,
    *,
    transport: str,
    topology: Topology | None,
    way: Way,
    max_in_flight: int,
    memory_limit: int | None,
    timeout: float,
    sizes: EagerSizes,
    agreed: dict[str, int | str],
    device: Device,
) -> tuple[Session, str]:
    """Makes the exchange of a communicator. Collective.

    Arguments:
        group: who takes part.
        placement: which rank hosts which expert.
        transport: a name, or `auto`: the first transport that reaches all ranks; where none does, `collective`, with a
            warning.
        topology: where the ranks are; None: as found.
        way: between domains; see `Communicator`.
        max_in_flight, memory_limit, timeout: see `Communicator`.
        sizes: fixed shapes of low-latency calls.
        agreed: further values that must be equal on all ranks.
        device: where this rank's tensors are.

    Returns:
        The session with its algorithms, and the name of what carries it.

    Raises:
        ValueError: ranks that disagree, a topology that does not hold, or a way that the device's tensors cannot go,
            on all ranks alike; an unknown name.
        TypeError: `topology` is something else.
        TransportUnavailable: the transport does not reach all ranks.
    """
    if transport not in exchange_names():
        raise ValueError(f"transport: unknown {transport!r}; available: {', '.join(exchange_names())}")
    if way not in WAYS:
        raise ValueError(f"algorithm: unknown {way!r}; available: {', '.join(WAYS)}")
    if not isinstance(topology, Topology | None):
        raise TypeError(f"topology must be a moecomm.Topology or None, got {type(topology).__name__}")
    whereabouts = "as found" if topology is None else f"hosts {topology.host_of}, domains {topology.domain_of}"
    mine: dict[str, int | str] = {
        "transport": transport,
        "topology": whereabouts,
        "algorithm": way,
        "max_in_flight": max_in_flight,
        "device": device.kind,
    }
    _check_agreement(group, {**agreed, **mine})
    if topology is not None and topology.num_ranks != group.size:
        raise ValueError(f"topology is of {topology.num_ranks} ranks, the group has {group.size}")
    peers = gather_peers(group, device.kind, device.identity())
    me = peers[group.rank]
    if memory_limit is None:
        sharers = sum((peer.host, peer.device.name) == (me.host, me.device.name) for peer in peers)
        memory_limit = device.default_memory_limit(sharers)

    def settled(far_from: list[list[int]]) -> Topology:
        if topology is None:
            return find_topology(peers, far_from)
        check_topology(topology, peers, far_from)
        return topology

    def collective() -> tuple[Session, str]:
        session = Collective(group, placement, sizes, max_in_flight=max_in_flight, memory_limit=memory_limit)
        session.topology = settled(group.all_gather(far_ranks(peers[group.rank], peers)))
        return session, Collective.name

    if transport == Collective.name:
        if not device.is_host:
            reason, remedy = f"it carries cpu tensors, not {device.kind} ones.", "Use transport='auto'."
            raise TransportUnavailable(f"transport {transport!r}", reason, remedy)
        return collective()
    try:
        choice = choose_together(transport, group, peers)
    except TransportUnavailable as error:
        if transport != "auto" or not device.is_host or Collective.refusal(group) is not None:
            raise
        _log.warning("falling back to the slow `collective` exchange: %s", error)
        return collective()
    carrier = choice.transport(group, peers, NUM_LANES)
    exchange: Exchange | None = None
    carrier.stall_timeout = timeout
    try:
        exchange = Exchange(
            carrier,
            placement,
            max_in_flight=max_in_flight,
            memory_limit=memory_limit,
            timeout=timeout,
            fixed_bytes=_fixed_bytes(sizes, group.size) if device.is_host else 0,
            hops=Hops(way),
            device=device,
        )
        exchange.refusals = choice.refusals
        found = exchange.topology = settled(exchange.reach.far_from)
        throughput: Algorithm = Rendezvous(exchange)
        low_latency: Algorithm
        if found.num_domains > 1 and device.is_host:
            throughput = Hierarchical(exchange, found, hidden=sizes.hidden, max_topk=sizes.max_topk)
        elif not exchange.reach.is_complete:
            throughput = DeviceHierarchical(exchange)
        elif found.num_domains > 1 and way == "hierarchical":
            raise ValueError(
                f"algorithm: 'hierarchical' puts to rails that have no address; these domains on {device.kind} address "
                "each other's memory, so rows go straight to their places; say 'auto' or 'direct'"
            )
        if device.is_host:
            low_latency = Eager(exchange, found, sizes, max_in_flight)
        else:
            low_latency = captured = Captured(exchange, sizes, max_in_flight, timeout)
            if exchange.reach.is_complete:
                throughput = Static(exchange, captured, sizes, max_in_flight)
        exchange.algorithms = {"throughput": throughput, "low_latency": low_latency}
    except BaseException:
        (exchange or carrier).close()
        raise
    return exchange, carrier.name


def _fixed_bytes(sizes: EagerSizes, num_ranks: int) -> int:
    """Address space of each rank for blocks of fixed shape: for many of them, within what a process can map."""
    most = _MAPPABLE_BYTES // num_ranks
    wanted = _FIXED_BLOCKS * (sizes.block_bytes + _PAGE)
    return min(wanted, most) // _PAGE * _PAGE


def _check_agreement(group: Group, mine: dict[str, int | str]) -> None:
    for rank, theirs in enumerate(group.all_gather(mine)):
        for name, value in mine.items():
            if theirs.get(name) != value:
                raise ValueError(
                    f"{name} must be equal on all ranks: rank {group.rank} has {value!r}, rank {rank} "
                    f"{theirs.get(name)!r}"
                )
