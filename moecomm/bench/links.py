"""The link between hosts: how fast it is here, measured in the same run by the same processes, with the same bytes.

    stream  plain TCP sockets, one from every rank to its rail on every other host, all at once in both directions: what
            the link gives
    hop     plain puts of our transport to the same rails, and a signal: the slow hop alone, nothing passed on behind it

Both carry the rows that must cross: one per token and host (unique pairs), and nothing else.
"""

from __future__ import annotations

import contextlib
import ipaddress
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, Protocol, final

import torch

from moecomm.bench.config import BenchConfig
from moecomm.bench.workload import Payload
from moecomm.errors import PeerTimeout, TransportError, TransportUnavailable
from moecomm.groups import Group
from moecomm.transports.base import WaitOutcome
from moecomm.transports.peers import gather_peers
from moecomm.transports.registry import choose_together, transport_names

__all__ = ["HOP", "STREAM", "Link", "RailHop", "RailStreams", "make_links", "own_address", "rail_bytes"]

# The names under which their times are kept.
STREAM = "stream"
HOP = "hop"

_CHUNK = 1 << 20
_HELLO = struct.Struct("!q")


def rail_bytes(config: BenchConfig, payloads: Sequence[Payload]) -> list[dict[int, int]]:
    """By sender: the bytes for each rank that is its rail on another host; 0 where it has none to send there.

    Arguments:
        config: the run.
        payloads: by rank.
    """
    topology = config.topology
    return [
        {
            topology.rail(rank, host): payload.needed[host] * config.row_bytes
            for host in range(topology.num_hosts)
            if host != topology.host_of[rank]
        }
        for rank, payload in enumerate(payloads)
    ]


def own_address(group: Group, meeting_point: str) -> str:
    """The address by which the other hosts reach this one. Collective.

    Arguments:
        group: the ranks.
        meeting_point: name or address of the host where the ranks have met.
    """
    mine = _address_towards(meeting_point)
    abroad = [address for address in group.all_gather(mine) if not ipaddress.ip_address(address).is_loopback]
    # The name of the own host often means the loopback interface.
    if ipaddress.ip_address(mine).is_loopback and abroad:
        mine = _address_towards(abroad[0])
    return mine


def _address_towards(name: str) -> str:
    """This host's own address on the way to another, as the system would choose it; nothing is sent."""
    family, _, _, _, place = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        own: str = probe.getsockname()[0]
        return own


class Link(Protocol):
    """One way to carry the rows that must cross."""

    def run(self) -> int:
        """Carry them once; all ranks together. Nanoseconds until this rank has done its part."""

    def close(self) -> None:
        """Let go of connections and memory."""


def make_links(config: BenchConfig, group: Group, payload: Payload, *, address: str) -> dict[str, Link]:
    """What is measured of the link: nothing on one host, the streams, and the hop where a transport can. Collective.

    Arguments:
        config: the run.
        group: the ranks.
        payload: of this rank.
        address: of this rank's host.
    """
    if config.topology.num_hosts == 1 or not config.bound:
        return {}
    sending = rail_bytes(config, group.all_gather(payload))
    timeout = min(config.timeout, 100.0)
    links: dict[str, Link] = {STREAM: RailStreams(group, sending, address=address, timeout=timeout)}
    if config.transport in ("auto", *transport_names()):
        with contextlib.suppress(TransportUnavailable):
            links[HOP] = RailHop(group, sending, transport=config.transport, timeout=timeout)
    return links


@final
class RailStreams:
    """Plain TCP streams along the rails. Construction and `run` are collective.

    Arguments:
        group: the ranks.
        sending: by sender, bytes for each rank it sends to; see `rail_bytes`.
        address: of this rank, where the others can reach it.
        timeout: seconds that one run, or meeting, may last.
    """

    def __init__(self, group: Group, sending: Sequence[dict[int, int]], *, address: str, timeout: float) -> None:
        self._rank = group.rank
        self._timeout = timeout
        self._out: dict[int, socket.socket] = {}
        self._in: dict[int, socket.socket] = {}
        self._to_send = dict(sending[group.rank])
        self._to_take = {source: to[group.rank] for source, to in enumerate(sending) if group.rank in to}
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family, backlog=group.size) as server:
            server.settimeout(timeout)
            places: list[tuple[str, int]] = group.all_gather((address, server.getsockname()[1]))
            for rank in self._to_send:
                self._out[rank] = socket.create_connection(places[rank], timeout=timeout)
                self._out[rank].sendall(_HELLO.pack(group.rank))
            for _ in self._to_take:
                stream, _ = server.accept()
                stream.settimeout(timeout)
                (source,) = _HELLO.unpack(stream.recv(_HELLO.size, socket.MSG_WAITALL))
                self._in[source] = stream
        for stream in (*self._out.values(), *self._in.values()):
            stream.setblocking(False)
        self._source = memoryview(bytearray([group.rank % 251 + 1]) * _CHUNK)
        self._buffer = memoryview(bytearray(_CHUNK))

    def run(self) -> int:
        """Nanoseconds until this rank has sent and received everything.

        Raises:
            TransportError: a stream ended early, or brought something else.
            PeerTimeout: it did not end in time.
        """
        begin = time.perf_counter_ns()
        deadline = time.monotonic() + self._timeout
        left = {rank: count for rank, count in self._to_send.items() if count}
        missing = {rank: count for rank, count in self._to_take.items() if count}
        with selectors.DefaultSelector() as selector:
            for rank in left:
                selector.register(self._out[rank], selectors.EVENT_WRITE, rank)
            for rank in missing:
                selector.register(self._in[rank], selectors.EVENT_READ, rank)
            while left or missing:
                for key, events in selector.select(timeout=1.0):
                    stream: Any = key.fileobj
                    counts = left if events & selectors.EVENT_WRITE else missing
                    counts[key.data] -= self._move(stream, key.data, counts[key.data], events)
                    if not counts[key.data]:
                        del counts[key.data]
                        selector.unregister(stream)
                if time.monotonic() > deadline:
                    raise PeerTimeout(
                        f"plain streams: rank {self._rank} still has bytes for ranks {sorted(left)} and expects some "
                        f"from ranks {sorted(missing)} after {self._timeout:g} s.",
                        operation="stream",
                        peers=tuple(sorted({*left, *missing})),
                    )
        return time.perf_counter_ns() - begin

    def _move(self, stream: socket.socket, rank: int, count: int, events: int) -> int:
        try:
            if events & selectors.EVENT_WRITE:
                return stream.send(self._source[: min(count, _CHUNK)])
            got = stream.recv_into(self._buffer[: min(count, _CHUNK)])
        except OSError as error:
            problem = f"plain stream to or from rank {rank}: {error}"
            raise TransportError(problem, operation="stream", peers=(rank,)) from error
        if got == 0 or self._buffer[got - 1] != rank % 251 + 1:
            problem = "it ended early" if got == 0 else "it brought what was not sent"
            raise TransportError(f"plain stream from rank {rank}: {problem}", operation="stream", peers=(rank,))
        return got

    def close(self) -> None:
        """Closes the sockets."""
        for stream in (*self._out.values(), *self._in.values()):
            stream.close()


@final
class RailHop:
    """Plain puts along the rails. Construction, `run` and `wrong_bytes` are collective.

    Arguments:
        group: the ranks.
        sending: by sender, bytes for each rank it sends to; see `rail_bytes`.
        transport: name of the transport, or `auto`.
        timeout: seconds that one wait may last.

    Raises:
        TransportUnavailable: the transport does not reach all ranks.
    """

    def __init__(self, group: Group, sending: Sequence[dict[int, int]], *, transport: str, timeout: float) -> None:
        peers = gather_peers(group)
        self._transport = choose_together(transport, group, peers).transport(group, peers, 1)
        self._timeout = timeout
        self._count = 0
        totals = [sum(to.get(rank, 0) for to in sending) for rank in range(group.size)]
        self._region = self._transport.allocate(max(1, *totals))
        self._incoming = {source: to[group.rank] for source, to in enumerate(sending) if group.rank in to}
        # A rail's sources lie behind each other.
        self._puts = [
            (rank, sum(to.get(rank, 0) for to in sending[: group.rank]), count)
            for rank, count in sending[group.rank].items()
            if count
        ]
        most = max((count for _, _, count in self._puts), default=1)
        self._source = torch.full((most,), group.rank % 251 + 1, dtype=torch.uint8)

    def run(self) -> int:
        """Nanoseconds until everything for this rank has come, and every rank has said so of its own."""
        begin = time.perf_counter_ns()
        for rank, offset, count in self._puts:
            self._transport.put(self._region, offset, self._source.data_ptr(), count, rank)
        self._transport.signal_all(0, 1)
        self._count += 1
        if self._transport.wait(0, self._count, self._timeout) is not WaitOutcome.REACHED:
            ranks = range(self._transport.num_ranks)
            missing = tuple(rank for rank in ranks if self._transport.lane(0, rank) < self._count)
            raise PeerTimeout(
                f"plain puts: nothing from ranks {list(missing)} within {self._timeout:g} s.",
                operation=f"hop #{self._count}",
                peers=missing,
            )
        return time.perf_counter_ns() - begin

    def wrong_bytes(self) -> int:
        """How many of the bytes that were last put here are not what was sent."""
        memory = torch.frombuffer(self._transport.mapping(self._region).view(0, self._region.nbytes), dtype=torch.uint8)
        wrong = begin = 0
        for source in sorted(self._incoming):
            end = begin + self._incoming[source]
            wrong += int((memory[begin:end] != source % 251 + 1).sum())
            begin = end
        return wrong

    def close(self) -> None:
        """Lets go of the transport."""
        self._transport.close()
