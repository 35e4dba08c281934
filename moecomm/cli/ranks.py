"""What `moecomm info` says about the ranks it was started on: where they are, and which transport takes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from moecomm.cli.console import Console
from moecomm.groups import Group
from moecomm.topology import Topology
from moecomm.topology_drawing import draw_topology
from moecomm.transports.domains import far_ranks, find_topology
from moecomm.transports.peers import Peer, gather_peers
from moecomm.transports.registry import refusal, transport_class, transport_names
from moecomm.version import __version__

__all__ = ["collect_ranks", "print_ranks"]

_MOST_PAIRS = 6


def collect_ranks(group: Group) -> dict[str, Any]:
    """Facts about all ranks; plain values, the same on every rank. Collective.

    Returns:
        `topology`: its fields, and `rails`: per rank the rank that serves it, by domain.
        `ranks`: who they are.
        `auto`: what `transport="auto"` takes for all, and `refusals` of the transports asked before (None where no
        transport reaches all, and `collective` is taken).
        `pairs`: the same for a group of each two domains, and of each domain of several ranks.
    """
    peers = gather_peers(group)
    me = peers[group.rank]
    topology = find_topology(peers, group.all_gather(far_ranks(me, peers)))
    domain = topology.domain_of[me.rank]
    pairs: dict[tuple[int, int], dict[str, str]] = {}
    if topology.local_index(me.rank) == 0:
        for other in range(topology.num_domains):
            ranks = sorted({*topology.ranks_in(domain), *topology.ranks_in(other)})
            if len(ranks) > 1:
                pairs[min(domain, other), max(domain, other)] = _refusals(me, [peers[rank] for rank in ranks])
    versions = {"moecomm": __version__, "torch": torch.__version__}
    said = group.all_gather((versions, _refusals(me, peers), pairs))
    ends: dict[tuple[int, int], list[dict[str, str]]] = {}
    for _, _, theirs in said:
        for pair, refusals in theirs.items():
            ends.setdefault(pair, []).append(refusals)
    return {
        "topology": {
            **{name: list(value) for name, value in dataclasses.asdict(topology).items()},
            "rails": [[topology.rail(rank, d) for d in range(topology.num_domains)] for rank in range(len(peers))],
        },
        "ranks": [
            {"rank": peer.rank, "pid": peer.pid, "hostname": peer.hostname, "host_id": peer.host, "versions": versions}
            for peer, (versions, _, _) in zip(peers, said, strict=True)
        ],
        "auto": _choice([refusals for _, refusals, _ in said]),
        "pairs": [{"domains": list(pair), **_choice(both)} for pair, both in sorted(ends.items())],
    }


def _refusals(me: Peer, peers: Sequence[Peer]) -> dict[str, str]:
    """Transport -> why it does not reach all of the peers from here; those that do are not named."""
    reasons = {name: refusal(transport_class(name), me, peers) for name in transport_names()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _choice(refusals: Sequence[dict[str, str]]) -> dict[str, Any]:
    """The first transport that nobody refuses, and why the ones before it were."""
    first: dict[str, str] = {}
    for name in transport_names():
        reason = next((theirs[name] for theirs in refusals if name in theirs), None)
        if reason is None:
            return {"transport": name, "refusals": first}
        first[name] = reason
    return {"transport": None, "refusals": first}


def print_ranks(console: Console, facts: dict[str, Any]) -> None:
    """Draw hosts, domains and rails, and say which transport is taken for whom, and why not another."""
    topology = Topology(*(tuple(facts["topology"][name]) for name in ("host_of", "domain_of", "host_names")))
    console.heading("Ranks")
    for line in draw_topology(topology, console.width - 2).splitlines():
        console.line(f"  {line}".rstrip())
    if topology.num_ranks == 1:
        console.line("  To see all ranks, start it by torchrun: `torchrun ... -m moecomm info`.")
        return
    versions = {tuple(one["versions"].items()): one["rank"] for one in reversed(facts["ranks"])}
    if len(versions) > 1:
        texts = (" ".join(map(" ".join, known)) + f" on rank {rank}" for known, rank in versions.items())
        console.warning(f"versions differ: {'; '.join(texts)}")
    console.heading("Transport that `auto` takes for them, and why not one asked before it")
    groups = {f"all {topology.num_ranks} ranks": facts["auto"]}
    if topology.num_domains > 1:
        groups |= _by_choice(facts["pairs"])
    told: set[str | None] = set()
    lines = []
    for who, choice in groups.items():
        lines.append((who, _told(choice, is_known=choice["transport"] in told)))
        told.add(choice["transport"])
    console.pairs(lines)


def _by_choice(pairs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The choice for domains and pairs of domains, alike ones together with the reasons of the first."""
    alike: dict[tuple[bool, str], list[dict[str, Any]]] = {}
    for pair in pairs:
        first, second = pair["domains"]
        alike.setdefault((first != second, pair["transport"] or ""), []).append(pair)
    groups = {}
    for (is_between, _), same in sorted(alike.items(), key=lambda item: item[0]):
        names = ["-".join(map(str, pair["domains"] if is_between else pair["domains"][:1])) for pair in same]
        more = f" and {len(names) - _MOST_PAIRS} more" if len(names) > _MOST_PAIRS else ""
        who = f"{'between' if is_between else 'inside'} domain{'s' if is_between or len(names) > 1 else ''}"
        groups[f"{who} {', '.join(names[:_MOST_PAIRS])}{more}"] = same[0]
    return groups


def _told(choice: dict[str, Any], is_known: bool) -> str:
    name = choice["transport"] or "collective, the slow last resort"
    if is_known:
        return name
    why = [f"not {name}: {reason}" for name, reason in choice["refusals"].items()]
    if choice["transport"] is not None:
        return "\n".join([name, *why])
    remedies = dict.fromkeys(transport_class(name).remedy() for name in choice["refusals"])
    return "\n".join([name, *why, *(f"remedy: {remedy}" for remedy in remedies)])
