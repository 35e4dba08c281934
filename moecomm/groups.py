"""Groups: who takes part, and one collective on Python objects with which everything else is bootstrapped.

Group
  SoloGroup      one rank
  TorchGroup     a `torch.distributed` process group
  LocalGroup     one rank of a LocalHub: ranks that are threads of one process
"""

from __future__ import annotations

import abc
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from moecomm.errors import TransportError

__all__ = ["Group", "LocalGroup", "LocalHub", "SoloGroup", "TorchGroup", "as_group"]


class Group(abc.ABC):
    """The ranks of one expert-parallel group, seen from one of them.

    Attributes:
        rank: index of this rank in the group.
        size: number of ranks.
        name: for messages.
    """

    rank: int
    size: int
    name: str

    @abc.abstractmethod
    def all_gather(self, obj: Any) -> list[Any]:
        """Gives every rank's `obj` (picklable), ordered by rank. Collective.

        Raises:
            TransportError, TimeoutError: a rank has ended, or does not come.
        """


class SoloGroup(Group):
    """A group of one rank; needs no `torch.distributed`."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.name = "solo"

    def all_gather(self, obj: Any) -> list[Any]:
        return [obj]


class TorchGroup(Group):
    """A `torch.distributed` process group.

    The group is not kept alive: a gloo group that outlives `destroy_process_group` aborts its process when the
    interpreter ends, and a communicator or a handle may well live until then.

    Arguments:
        process_group: the group; this process must be one of its ranks.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._reference = weakref.ref(process_group)
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError("group: this process is not a member of the process group")
        self.name = f"torch:{getattr(process_group, 'group_name', 'group')}"

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group.

        Raises:
            TransportError: it has been destroyed.
        """
        process_group = self._reference()
        if process_group is None:
            message = f"group {self.name} has been destroyed (torch.distributed.destroy_process_group)"
            raise TransportError(message, operation="process_group", peers=())
        return process_group

    def all_gather(self, obj: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        process_group = self.process_group
        try:
            dist.all_gather_object(gathered, obj, group=process_group)
        except RuntimeError as error:
            message = (
                f"all_gather in group {self.name}: rank {self.rank} of {self.size} cannot reach the others: {error}"
            )
            raise TransportError(message, operation="all_gather", peers=()) from error
        return gathered


class LocalHub:
    """Where the ranks of a group of threads meet.

    Arguments:
        size: number of ranks.
        stepped: one thread runs at a time and the baton moves on, in rank order, only when the running rank has to
            wait or leaves: the whole group then runs deterministically, and a wait that nobody can fulfil fails at
            once instead of after a deadline.
    """

    def __init__(self, size: int, stepped: bool = False) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self.size = size
        self.stepped = stepped
        self.departed: dict[int, str] = {}
        self._condition = threading.Condition()
        self._baton = 0
        self._fruitless_polls = 0
        self._clock = 0.0  # of the waits that ended in vain, in seconds
        self._deadlines: dict[int, float] = {}  # of the ranks that wait
        self._gathers: dict[int, dict[int, Any]] = {}
        self._taken: dict[int, int] = {}
        self._on_leave: dict[int, Callable[[int, str], None]] = {}
        self._callback_tickets = itertools.count()

    def groups(self) -> list[LocalGroup]:
        """One group object per rank, to be used by one thread each."""
        return [LocalGroup(self, rank) for rank in range(self.size)]

    def on_leave(self, callback: Callable[[int, str], None]) -> Callable[[], None]:
        """Registers `callback(rank, reason)`, called when a rank leaves; returns what takes it off again."""
        ticket = next(self._callback_tickets)
        with self._condition:
            self._on_leave[ticket] = callback
        return lambda: self._forget(ticket)

    def _forget(self, ticket: int) -> None:
        with self._condition:
            self._on_leave.pop(ticket, None)

    def wait_until(self, rank: int, predicate: Callable[[], bool], timeout: float) -> bool:
        """Waits until `predicate()` holds; False if not within `timeout` seconds.

        Stepped: when nobody can go on, the wait whose deadline comes first ends at once, as if its time had passed.
        """
        if self.stepped:
            return self._step_until(rank, predicate, timeout)
        deadline = time.monotonic() + timeout
        with self._condition:
            while not predicate():
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                self._condition.wait(min(remaining, 0.2))
        return True

    def _step_until(self, rank: int, predicate: Callable[[], bool], timeout: float) -> bool:
        with self._condition:
            deadline = self._deadlines[rank] = self._clock + timeout
            while not predicate():
                self._fruitless_polls += 1
                # Every live rank has looked in vain since the last progress, and so has this one once more.
                stuck = self._fruitless_polls > self.size - len(self.departed)
                if stuck and deadline == min(self._deadlines.values()):
                    self._fruitless_polls = 0
                    self._clock = deadline
                    self._deadlines.pop(rank, None)
                    return False
                self._pass_baton(rank)
                self._condition.wait_for(lambda: self._baton == rank)
            self._fruitless_polls = 0
            self._deadlines.pop(rank, None)
        return True

    def _pass_baton(self, rank: int) -> None:
        for step in range(1, self.size + 1):
            heir = (rank + step) % self.size
            if heir not in self.departed:
                self._baton = heir
                break
        self._condition.notify_all()

    def enter(self, rank: int) -> None:
        """Begins a rank's run (stepped: waits for its first turn)."""
        if self.stepped:
            with self._condition:
                self._condition.wait_for(lambda: self._baton == rank)

    def leave(self, rank: int, error: BaseException | None = None) -> None:
        """Ends a rank's run; ranks that wait for it learn why."""
        reason = "it has finished" if error is None else f"it has failed: {type(error).__name__}: {error}"
        with self._condition:
            self.departed[rank] = reason
            self._deadlines.pop(rank, None)
            self._fruitless_polls = 0
            callbacks = list(self._on_leave.values())
            if self.stepped and len(self.departed) < self.size:
                self._pass_baton(rank)
            self._condition.notify_all()
        for callback in callbacks:
            callback(rank, reason)

    def gather(self, rank: int, ticket: int, obj: Any, timeout: float) -> list[Any]:
        """The all-gather number `ticket` of this hub."""
        with self._condition:
            slot = self._gathers.setdefault(ticket, {})
            slot[rank] = obj
            self._fruitless_polls = 0
            self._condition.notify_all()

        def settled() -> bool:
            return len(slot) == self.size or any(peer not in slot for peer in self.departed)

        done = self.wait_until(rank, settled, timeout)
        if not done or len(slot) < self.size:
            missing = [peer for peer in range(self.size) if peer not in slot]
            raise TimeoutError(f"all_gather: rank {rank} waited in vain for ranks {missing}; departed: {self.departed}")
        result = [slot[peer] for peer in range(self.size)]
        with self._condition:
            self._taken[ticket] = self._taken.get(ticket, 0) + 1
            if self._taken[ticket] == self.size:
                del self._gathers[ticket], self._taken[ticket]
        return result


class LocalGroup(Group):
    """One rank of a `LocalHub`; used by one thread.

    Arguments:
        hub: where the ranks meet.
        rank: this rank.
        timeout: seconds that an all-gather waits for the others.
    """

    def __init__(self, hub: LocalHub, rank: int, timeout: float = 60.0) -> None:
        self.hub = hub
        self.rank = rank
        self.size = hub.size
        self.name = "local"
        self.timeout = timeout
        self._tickets = itertools.count()

    def all_gather(self, obj: Any) -> list[Any]:
        return self.hub.gather(self.rank, next(self._tickets), obj, self.timeout)

    def enter(self) -> None:
        """Begins this rank's run; call it first in the rank's thread."""
        self.hub.enter(self.rank)

    def leave(self, error: BaseException | None = None) -> None:
        """Ends this rank's run; call it last in the rank's thread."""
        self.hub.leave(self.rank, error)


def as_group(group: Any) -> Group:
    """Makes a `Group` of what users pass.

    Arguments:
        group: a `Group`, a `torch.distributed` ProcessGroup, a one-dimensional DeviceMesh, or None: the default group
            if `torch.distributed` is initialised, else one rank.

    Raises:
        TypeError: for anything else.
        ValueError: for a mesh of more than one dimension.
    """
    if isinstance(group, Group):
        return group
    if group is None:
        if dist.is_available() and dist.is_initialized() and dist.group.WORLD is not None:
            return TorchGroup(dist.group.WORLD)
        return SoloGroup()
    if isinstance(group, dist.ProcessGroup):
        return TorchGroup(group)
    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group: a DeviceMesh must have one dimension, got {group.ndim}; pass mesh['ep']")
        return TorchGroup(group.get_group())
    raise TypeError(f"group must be a ProcessGroup, a DeviceMesh, a moecomm.Group or None, got {type(group).__name__}")
