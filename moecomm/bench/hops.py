"""From what the ranks left to what crossed between hosts: the columns of the second table. Pure functions.

    needed     rows that must cross, x row bytes: dispatch: one per token and host that it goes to (unique pairs);
               combine: the same rows on their way home, summed per host; pair: both
    sent       payload that moecomm put to ranks of other hosts, by its counters
    wire       bytes that left the host, by its interfaces
    forwarded  payload that moecomm passed on inside the host, by its counters

all of the host that has most. `x needed` is wire over needed, both summed over the hosts. Times of the link, of the
slowest rank: `stream` plain TCP that carries the needed rows, `hop` plain puts of the same; for the pair both twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moecomm.bench.config import BenchConfig
from moecomm.bench.links import HOP, STREAM
from moecomm.bench.statistics import summarise

__all__ = ["Hops", "make_hops"]

_PARTS = {"dispatch": ("dispatch",), "combine": ("combine",), "pair": ("dispatch", "combine")}


@dataclass(frozen=True)
class Hops:
    """What crossed between hosts in one operation of one backend, in bytes and microseconds.

    Arguments:
        needed, sent, wire, forwarded: as stated on top; None where it is not known.
        wire_ratio: `x needed`; None where it is not known, or nothing needs to cross.
        median_us: of the operation.
        stream_us, hop_us: of the link; None if not measured.
    """

    needed: int
    sent: int | None
    wire: int | None
    forwarded: int | None
    wire_ratio: float | None
    median_us: float
    stream_us: float | None
    hop_us: float | None

    @property
    def wire_gbps(self) -> float | None:
        """What the link carried, in 1e9 bytes per second."""
        return None if self.wire is None else self.wire / 1e3 / self.median_us

    @property
    def link_gbps(self) -> float | None:
        """What plain streams carried, payload, in 1e9 bytes per second."""
        return None if self.stream_us is None else self.needed / 1e3 / self.stream_us

    @property
    def link_fraction(self) -> float | None:
        """The time of plain streams over the time taken: 1 = the needed rows at the rate of the link."""
        return None if self.stream_us is None else self.stream_us / self.median_us

    @property
    def hop_ratio(self) -> float | None:
        """The time taken over that of the slow hop alone: 1 = the second hop is hidden behind it."""
        return None if self.hop_us is None else self.median_us / self.hop_us


def make_hops(
    config: BenchConfig, cases: Sequence[Mapping[str, Any]], backend: str, op: str, median_us: float
) -> Hops | None:
    """Reduce one case of all ranks; None on one host.

    Arguments:
        config: the run, with its hosts.
        cases: by rank.
        backend, op: which.
        median_us: of the operation.
    """
    topology = config.topology
    if topology.num_hosts == 1:
        return None
    parts = _PARTS[op]
    needed = [sum(_needed(config, cases, part, host) for part in parts) for host in range(topology.num_hosts)]

    def by_host(what: str) -> list[int] | None:
        """Sums over a host's ranks; its interfaces are read by each rank, so these are taken from the first."""
        totals = []
        for host in range(topology.num_hosts):
            ranks = topology.ranks_on(host)
            counted = ranks[:1] if what == "wire" else ranks
            values = [cases[rank]["traffic"][backend][part][what] for rank in counted for part in parts]
            if None in values:
                return None
            totals.append(sum(values))
        return totals

    sent, wire, forwarded = by_host("sent"), by_host("wire"), by_host("forwarded")
    return Hops(
        needed=max(needed),
        sent=None if sent is None else max(sent),
        wire=None if wire is None else max(wire),
        forwarded=None if forwarded is None else max(forwarded),
        wire_ratio=None if wire is None or not sum(needed) else sum(wire) / sum(needed),
        median_us=median_us,
        stream_us=_link_us(cases, STREAM, len(parts)),
        hop_us=_link_us(cases, HOP, len(parts)),
    )


def _needed(config: BenchConfig, cases: Sequence[Mapping[str, Any]], part: str, host: int) -> int:
    """Bytes that must leave `host`; those of combine are the ones that dispatch has brought there."""
    topology = config.topology
    if part == "dispatch":
        rows = sum(sum(cases[rank]["payload"]["needed"]) for rank in topology.ranks_on(host))
    else:
        rows = sum(case["payload"]["needed"][host] for case in cases)
    return rows * config.row_bytes


def _link_us(cases: Sequence[Mapping[str, Any]], name: str, times: int) -> float | None:
    if name not in cases[0]["nanoseconds"]:
        return None
    return times * summarise([case["nanoseconds"][name]["rails"] for case in cases]).median_us
