"""Memory that processes of one host share: anonymous files, opened through the process that made them."""

from __future__ import annotations

import errno
from collections.abc import Collection

from moecomm import _C
from moecomm.errors import TransportUnavailable
from moecomm.transports.base import Transport

__all__ = ["map_shared"]


def map_shared(transport: Transport, nbytes: int, near: Collection[int]) -> list[_C.Mapping | None]:
    """Makes my part of a region and maps those of the ranks near me, by rank; None for the others. Collective.

    Arguments:
        transport: whose ranks take part, all of them.
        nbytes: of each part.
        near: ranks of this host that can open each other's files; each of them must name me as well.

    Raises:
        TransportUnavailable: on all ranks, if one cannot have the memory or cannot open a peer's.
    """
    own, no_memory = None, ""
    try:
        own = _C.Mapping.create_shared("moecomm", nbytes)
    except OSError as error:
        no_memory = transport.refused(nbytes, error)
    offers = transport.group.all_gather((no_memory, own.fd if own else -1))
    no_memory = next((text for text, _ in offers if text), "")
    if own is None or no_memory:
        raise transport.no_memory(no_memory)
    mappings: list[_C.Mapping | None] = [None] * len(offers)
    problem = ""
    for rank in near:
        try:
            pid, fd = transport.peers[rank].pid, offers[rank][1]
            mappings[rank] = own if rank == transport.rank else _C.Mapping.open_peer(pid, fd, nbytes)
        except OSError as error:
            no_memory = transport.refused(nbytes, error) if error.errno == errno.ENOMEM else no_memory
            problem = f"rank {transport.rank} cannot map the memory of rank {rank}: {error}."
            break
    mappings[transport.rank] = own
    # Nobody lets go of the descriptor before everybody has opened it, and all succeed or all refuse.
    outcomes = [outcome for outcome in transport.group.all_gather((problem, no_memory)) if outcome[0]]
    own.close_fd()
    for problem, no_memory in outcomes:
        if no_memory:
            raise transport.no_memory(no_memory)
        raise TransportUnavailable(transport.name, problem, transport.remedy())
    return mappings
