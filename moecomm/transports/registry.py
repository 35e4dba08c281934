"""Transports by name. A transport is imported when it is asked for, never before."""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Sequence

from moecomm.errors import TransportUnavailable
from moecomm.groups import Group
from moecomm.transports.base import Transport
from moecomm.transports.peers import Peer

__all__ = ["Choice", "choose", "choose_together", "register", "transport_class", "transport_names"]

_log = logging.getLogger("moecomm.transports")

# In the order in which they are asked: the cheapest way to reach a peer first.
_known: dict[str, str] = {
    "local": "moecomm.transports.local:LocalTransport",
    "shm": "moecomm.transports.shm:ShmTransport",
    "nvlink": "moecomm.transports.nvlink:NvlinkTransport",
    "shm+ucx": "moecomm.transports.composed:ComposedTransport",
    "ucx": "moecomm.transports.ucx:UcxTransport",
    "nvshmem": "moecomm.transports.nvshmem:NvshmemTransport",
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """The transport that was chosen, and why the ones asked before it were not.

    Attributes:
        transport: the class.
        refusals: name -> reason.
    """

    transport: type[Transport]
    refusals: dict[str, str]


def transport_names() -> list[str]:
    """All names, in the order in which `auto` asks."""
    return list(_known)


def register(name: str, path: str) -> None:
    """Adds a transport.

    Arguments:
        name: its name.
        path: `module:Class`, imported when asked for.

    Raises:
        ValueError: if the name is taken.
    """
    if name in _known:
        raise ValueError(f"name: a transport {name!r} is registered already")
    _known[name] = path


def transport_class(name: str) -> type[Transport]:
    """The class of a transport.

    Raises:
        ValueError: if there is no transport of this name.
    """
    if name not in _known:
        raise ValueError(f"transport: unknown {name!r}; available: {', '.join(_known)}")
    module, _, attribute = _known[name].partition(":")
    found: type[Transport] = getattr(importlib.import_module(module), attribute)
    return found


def refusal(transport: type[Transport], me: Peer, peers: Sequence[Peer]) -> str | None:
    """Why `transport` does not reach all peers, or None if it does."""
    kinds = transport.capabilities.device_types
    if me.device_type not in kinds:
        return f"it carries {' and '.join(kinds)} tensors, not {me.device_type} ones."
    return next((reason for reason in transport.probe(me, peers) if reason is not None), None)


def choose(name: str, me: Peer, peers: Sequence[Peer]) -> Choice:
    """Finds the transport that reaches all peers, from one rank's point of view.

    Arguments:
        name: `auto`, or the only one to ask.

    Raises:
        TransportUnavailable: if none does; with every reason and remedy.
    """
    candidates, refusals = _candidates(name, me), dict[str, str]()
    return _chosen(name, candidates, _first(candidates, 0, me, peers, refusals), refusals)


def choose_together(name: str, group: Group, peers: Sequence[Peer]) -> Choice:
    """Finds the transport by which all ranks reach all others, the same one on every rank. Collective.

    One rank may reach another that does not reach it (of two users, root), and only the rank itself knows whether it
    finds a library.

    Raises:
        TransportUnavailable: on all ranks, if there is none.
    """
    candidates, refusals = _candidates(name, peers[group.rank]), dict[str, str]()
    place = 0
    while True:
        place = _first(candidates, place, peers[group.rank], peers, refusals)
        answers: list[tuple[int, dict[str, str]]] = group.all_gather((place, refusals))
        furthest = max(theirs for theirs, _ in answers)
        for candidate in candidates[place:furthest]:
            refusals[candidate] = next(reasons[candidate] for _, reasons in answers if candidate in reasons)
        if all(theirs == furthest for theirs, _ in answers):
            return _chosen(name, candidates, place, refusals)
        place = furthest


def _candidates(name: str, me: Peer) -> list[str]:
    """Whom to ask, in order: `auto` means those that carry the kind of device that all ranks have."""
    if name != "auto":
        return [name]
    return [one for one in transport_names() if me.device_type in transport_class(one).capabilities.device_types]


def _first(candidates: Sequence[str], place: int, me: Peer, peers: Sequence[Peer], refusals: dict[str, str]) -> int:
    """The first candidate from `place` on that reaches all peers, or their number; notes why the others do not."""
    for candidate in candidates[place:]:
        reason = refusal(transport_class(candidate), me, peers)
        if reason is None:
            break
        _log.debug("transport %s: %s", candidate, reason)
        refusals[candidate] = reason
        place += 1
    return place


def _chosen(name: str, candidates: Sequence[str], place: int, refusals: dict[str, str]) -> Choice:
    if place < len(candidates):
        return Choice(transport_class(candidates[place]), refusals)
    reasons = " ".join(f"{candidate}: {reason}" for candidate, reason in refusals.items())
    remedies = " ".join(dict.fromkeys(transport_class(candidate).remedy() for candidate in refusals))
    raise TransportUnavailable(f"transport {name!r}", reasons, remedies)
