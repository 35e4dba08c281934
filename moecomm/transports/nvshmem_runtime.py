"""NVSHMEM of this process: started once, shared by all transports, ended with the last of them.

A process has one NVSHMEM, for one set of processes. So the first communicator over it should have all processes that
will use it; later ones have the same, in any order. One that somebody else has started is used, and left to them.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from moecomm.errors import TransportUnavailable
from moecomm.groups import Group
from moecomm.transports.nvshmem_engine import Engine, EngineError

__all__ = ["Runtime", "SymmetricUse", "acquire"]

_log = logging.getLogger("moecomm.transports")
_NAME = "transport 'nvshmem'"
_WORLD = (
    "Make the first Communicator over all processes that are to use NVSHMEM, and later ones over the same processes."
)

_lock = threading.Lock()
_world = ""  # which NVSHMEM was started here: the same text in all its processes; empty = not by this module
_users = 0
_is_abandoned = False
_left: list[_Left] = []  # memory of closed transports in which tensors lay on some rank; the same on all ranks


class SymmetricUse:
    """Lives as long as something lies in a piece of symmetric memory."""

    __slots__ = ("__weakref__",)


class _Left(NamedTuple):
    """Symmetric memory that could not be given back.

    Attributes:
        address: of mine.
        use: what lies in it here, if anything ever did.
    """

    address: int
    use: weakref.ref[SymmetricUse] | None


class _Offer(NamedTuple):
    """What one rank says of itself.

    Attributes:
        problem: the sentence why it cannot, or empty.
        is_started: NVSHMEM runs in its process.
        world: which one it has started.
        unique_id: for a new start, from rank 0.
        is_unused: for each piece of memory that was left, whether nothing lies in it any more.
    """

    problem: str
    is_started: bool = False
    world: str = ""
    unique_id: bytes = b""
    is_unused: tuple[bool, ...] = ()


class Runtime:
    """One transport's share of NVSHMEM; from `acquire`.

    Attributes:
        engine: what carries out.
        pes: by rank, its PE.
    """

    def __init__(self, engine: Engine, pes: list[int]) -> None:
        self.engine = engine
        self.pes = pes
        self._is_held = True

    def release(self) -> None:
        """Gives the share back. Collective: the last one ends NVSHMEM, if it is ours and no memory is left in use."""
        global _world
        if self._leave() and not sys.is_finalizing():
            _world = ""
            self.engine.finish()

    def leave(self, memory: Sequence[tuple[int, weakref.ref[SymmetricUse] | None]]) -> None:
        """Leaves pieces of memory, addresses and uses, that are in use on some rank. Collective."""
        _left.extend(_Left(*piece) for piece in memory)

    def abandon(self) -> None:
        """Gives the share back without the peers, who may be dead: NVSHMEM then stays until the process ends."""
        global _is_abandoned
        _is_abandoned = True
        self._leave()

    def _leave(self) -> bool:
        """Whether NVSHMEM is to be ended now."""
        global _users
        with _lock:
            if not self._is_held:
                return False
            self._is_held = False
            _users -= 1
            return _users == 0 and bool(_world) and not _is_abandoned and not _left


def acquire(group: Group, engine: Engine, remedy: str) -> Runtime:
    """Starts NVSHMEM for the group, or joins the one that runs. Collective.

    Raises:
        TransportUnavailable: on all ranks: one cannot start it, it runs for other processes, or a rank that had it
            before went away without the others.
    """
    global _world, _users
    offers: list[_Offer] = group.all_gather(_offer(group, engine))
    _all_or_none([offer.problem for offer in offers], remedy)
    running = [rank for rank, offer in enumerate(offers) if offer.is_started]
    if not running:
        unique_id, problem = offers[0].unique_id, ""
        try:
            engine.start(unique_id, group.rank, group.size)
            _world = hashlib.sha256(unique_id).hexdigest()
        except EngineError as error:
            problem = f"rank {group.rank}: {error}."
        _all_or_none(group.all_gather(problem), remedy)
    elif len(running) < len(offers):
        missing = next(rank for rank in range(len(offers)) if rank not in running)
        reason = f"NVSHMEM runs in the process of rank {running[0]}, but not in that of rank {missing}."
        raise TransportUnavailable(_NAME, reason, _WORLD)
    worlds = {offer.world for offer in offers}
    seats: list[tuple[int, int]] = group.all_gather((engine.my_pe(), engine.num_pes()))
    pes = [pe for pe, _ in seats]
    if any(total != group.size for _, total in seats) or len(set(pes)) < len(pes) or len(worlds) > 1:
        reason = (
            f"NVSHMEM was started for other processes than these {group.size} ranks: by rank their PEs are "
            f"{[f'{pe} of {total}' for pe, total in seats]}."
        )
        raise TransportUnavailable(_NAME, reason, _WORLD)
    try:
        _give_back(engine, [offer.is_unused for offer in offers])
    except EngineError as error:
        raise TransportUnavailable(_NAME, f"rank {group.rank}: {error}.", _WORLD) from error
    with _lock:
        _users += 1
    return Runtime(engine, pes)


def _give_back(engine: Engine, is_unused: list[tuple[bool, ...]]) -> None:
    """Frees what earlier transports have left, as far as nothing lies in it any more on any rank. Collective."""
    unused = [all(flags) for flags in zip(*is_unused, strict=True)]
    for piece, is_free in reversed(list(zip(tuple(_left), unused, strict=True))):
        if is_free:
            engine.free(piece.address)
            _left.remove(piece)


def _offer(group: Group, engine: Engine) -> _Offer:
    problem = engine.problem()
    if problem:
        return _Offer(f"rank {group.rank}: {problem}")
    try:
        is_started = engine.is_started()
        if is_started and _is_abandoned:
            return _Offer(
                f"rank {group.rank}: NVSHMEM was left without its peers by an earlier communicator of this process."
            )
        unique_id = engine.unique_id() if group.rank == 0 and not is_started else b""
    except (EngineError, ImportError, OSError) as error:
        return _Offer(f"rank {group.rank}: {error}.")
    unused = tuple(piece.use is None or piece.use() is None for piece in _left)
    return _Offer("", is_started, _world if is_started else "", unique_id, unused)


def _all_or_none(problems: list[str], remedy: str) -> None:
    for problem in problems:
        if problem:
            raise TransportUnavailable(_NAME, problem, remedy)
