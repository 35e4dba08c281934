"""What `moecomm info` says about the ranks it was started on: where they are, and which transport takes them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import torch

from moecomm.cli.console import Console
from moecomm.devices.base import DeviceIdentity
from moecomm.devices.registry import find_device
from moecomm.groups import Group
from moecomm.topology import Topology
from moecomm.topology_drawing import draw_topology
from moecomm.transports.domains import far_ranks, find_topology
from moecomm.transports.peers import Peer, gather_peers
from moecomm.transports.registry import refusal, transport_class, transport_names
from moecomm.version import __version__

__all__ = ["collect_ranks", "print_ranks"]

_MOST_PAIRS = 6
_NO_CUDA = "torch finds no CUDA device"


def collect_ranks(group: Group) -> dict[str, Any]:
    """Facts about all ranks; plain values, the same on every rank. Collective.

    Returns:
        `topology`: its fields, and `rails`: per rank the rank that serves it, by domain.
        `ranks`: who they are.
        `auto`: what `transport="auto"` takes for all, and `refusals` of the transports asked before (None where no
        transport reaches all, and `collective` is taken).
        `pairs`: the same for a group of each two domains, and of each domain of several ranks.
        `gpu`: None where nobody has one; else `devices`, by rank the `device` that it would use under torchrun, None
        without one, and the `problem` with it; and where no rank has any, topology, auto and pairs of their CUDA
        tensors (`transport` is None where there is no way).
    """
    peers = gather_peers(group)
    versions = {"moecomm": __version__, "torch": torch.__version__}
    said = group.all_gather(versions)
    return {
        **_whereabouts(group, peers),
        "ranks": [
            {"rank": peer.rank, "pid": peer.pid, "hostname": peer.hostname, "host_id": peer.host, "versions": theirs}
            for peer, theirs in zip(peers, said, strict=True)
        ],
        "gpu": _gpu_facts(group),
    }


def _gpu_facts(group: Group) -> dict[str, Any] | None:
    name, identity, problem = _my_gpu()
    devices = group.all_gather({"device": name, "problem": problem})
    if all(one["device"] is None for one in devices):
        return None
    if any(one["problem"] for one in devices):
        return {"devices": devices}
    return {"devices": devices, **_whereabouts(group, gather_peers(group, "cuda", identity))}


def _my_gpu() -> tuple[str | None, DeviceIdentity, str]:
    """The GPU that this rank would use, who it is, and why it would not."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return None, DeviceIdentity(), _NO_CUDA
    name = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % count}"
    try:
        return name, find_device(name).identity(), ""
    except Exception as error:  # noqa: BLE001  whatever keeps a GPU away is to be told, and all ranks go on
        return name, DeviceIdentity(), str(error) or type(error).__name__


def _whereabouts(group: Group, peers: Sequence[Peer]) -> dict[str, Any]:
    """Topology and transports of tensors on the kind of device of these peers."""
    me = peers[group.rank]
    topology = find_topology(peers, group.all_gather(far_ranks(me, peers)))
    domain = topology.domain_of[me.rank]
    pairs: dict[tuple[int, int], dict[str, str]] = {}
    if topology.local_index(me.rank) == 0:
        for other in range(topology.num_domains):
            ranks = sorted({*topology.ranks_in(domain), *topology.ranks_in(other)})
            if len(ranks) > 1:
                pairs[min(domain, other), max(domain, other)] = _refusals(me, [peers[rank] for rank in ranks])
    said = group.all_gather((_refusals(me, peers), pairs))
    ends: dict[tuple[int, int], list[dict[str, str]]] = {}
    for _, theirs in said:
        for pair, refusals in theirs.items():
            ends.setdefault(pair, []).append(refusals)
    return {
        "topology": {
            **{name: list(value) for name, value in dataclasses.asdict(topology).items()},
            "rails": [[topology.rail(rank, d) for d in range(topology.num_domains)] for rank in range(len(peers))],
        },
        "auto": _choice([refusals for refusals, _ in said], me.device_type),
        "pairs": [{"domains": list(pair), **_choice(both, me.device_type)} for pair, both in sorted(ends.items())],
    }


def _names(kind: str) -> list[str]:
    """Whom `auto` asks for tensors on a kind of device, in order."""
    return [name for name in transport_names() if kind in transport_class(name).capabilities.device_types]


def _refusals(me: Peer, peers: Sequence[Peer]) -> dict[str, str]:
    """Transport -> why it does not reach all of the peers from here; those that do are not named."""
    reasons = {name: refusal(transport_class(name), me, peers) for name in _names(me.device_type)}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _choice(refusals: Sequence[dict[str, str]], kind: str) -> dict[str, Any]:
    """The first transport that nobody refuses, and why the ones before it were."""
    first: dict[str, str] = {}
    for name in _names(kind):
        reason = next((theirs[name] for theirs in refusals if name in theirs), None)
        if reason is None:
            return {"transport": name, "refusals": first}
        first[name] = reason
    return {"transport": None, "refusals": first}


def print_ranks(console: Console, facts: dict[str, Any]) -> None:
    """Draw hosts, domains and rails, and say which transport is taken for whom, and why not another."""
    console.heading("Ranks")
    topology = _draw(console, facts["topology"])
    if topology.num_ranks == 1:
        console.line("  To see all ranks, start it by torchrun: `torchrun ... -m moecomm info`.")
        return
    versions = {tuple(one["versions"].items()): one["rank"] for one in reversed(facts["ranks"])}
    if len(versions) > 1:
        texts = (" ".join(map(" ".join, known)) + f" on rank {rank}" for known, rank in versions.items())
        console.warning(f"versions differ: {'; '.join(texts)}")
    console.heading("Transport that `auto` takes for them, and why not one asked before it")
    _print_choices(console, facts, topology, "collective, the slow last resort")
    gpu = facts["gpu"]
    if gpu is None:
        return
    console.heading("GPUs of the ranks: domains are joined by NVLink, as far as one host sees")
    for rank, one in enumerate(gpu["devices"]):
        if one["problem"]:
            console.warning(f"rank {rank}, {one['device'] or 'no GPU'}: {one['problem']}")
    if "topology" in gpu:
        topology = _draw(console, gpu["topology"])
        console.heading("Transport that `auto` takes for their CUDA tensors")
        _print_choices(console, gpu, topology, "none")


def _draw(console: Console, fields: dict[str, Any]) -> Topology:
    topology = Topology(*(tuple(fields[name]) for name in ("host_of", "domain_of", "host_names")))
    for line in draw_topology(topology, console.width - 2).splitlines():
        console.line(f"  {line}".rstrip())
    return topology


def _print_choices(console: Console, facts: dict[str, Any], topology: Topology, last_resort: str) -> None:
    groups = {f"all {topology.num_ranks} ranks": facts["auto"]}
    if topology.num_domains > 1:
        groups |= _by_choice(facts["pairs"])
    told: set[str | None] = set()
    lines = []
    for who, choice in groups.items():
        lines.append((who, _told(choice, last_resort, is_known=choice["transport"] in told)))
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


def _told(choice: dict[str, Any], last_resort: str, *, is_known: bool) -> str:
    name = choice["transport"] or last_resort
    if is_known:
        return name
    why = [f"not {name}: {reason}" for name, reason in choice["refusals"].items()]
    if choice["transport"] is not None:
        return "\n".join([name, *why])
    remedies = dict.fromkeys(transport_class(name).remedy() for name in choice["refusals"])
    return "\n".join([name, *why, *(f"remedy: {remedy}" for remedy in remedies)])
