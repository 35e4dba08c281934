"""Memory that tensors lie in, and when it may be used again: after the work that the tensors' users were given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from moecomm import _C
from moecomm.devices.base import Event, Stream

__all__ = ["Lease", "Returns", "events_of"]


class _Return(NamedTuple):
    begin: int
    end: int
    events: tuple[Event, ...]


class Returns:
    """Ranges of memory whose tensors have died, with the events after which they may be written to.

    Tensors die anywhere, also in the middle of a method of this class: what is noted then takes no lock.
    """

    def __init__(self) -> None:
        self._noted: deque[_Return] = deque()

    def note(self, begin: int, end: int, events: tuple[Event, ...]) -> None:
        """Notes that the tensors of a range have died, before the range is free to be taken."""
        self._noted.append(_Return(begin, end, events))

    def claim(self, begin: int, end: int) -> list[Event]:
        """The events that have not passed for any part of a range."""
        found: list[Event] = []
        for _ in range(len(self._noted)):
            try:
                one = self._noted.popleft()
            except IndexError:  # another thread has taken it
                break
            pending = tuple(event for event in one.events if not event.has_passed())
            if not pending:
                continue
            # It stays: other ranges may overlap it, too.
            self._noted.append(one._replace(events=pending))
            if one.begin < end and begin < one.end:
                found += pending
        return found


class Lease:
    """What a tensor keeps alive: its block, which returns behind the work of the tensor's stream.

    Arguments:
        block: the memory.
        end_of_use: gives the events after which it is free; called once, when this dies, in any thread.
        returns: where that is noted.
    """

    __slots__ = ("__weakref__", "_block", "_end_of_use", "_returns")

    def __init__(self, block: _C.Block, returns: Returns, end_of_use: Callable[[], tuple[Event, ...]]) -> None:
        self._block = block
        self._returns = returns
        self._end_of_use = end_of_use

    def __del__(self) -> None:
        # First the note: as soon as the block dies, it may be taken.
        begin = self._block.address
        self._returns.note(begin, begin + self._block.nbytes, self._end_of_use())


def events_of(stream: Stream, current: Callable[[], Stream]) -> tuple[Event, ...]:
    """Marks in a tensor's stream and in that of the thread in which the tensor dies."""
    here = current()
    return (stream.record(),) if here.is_same(stream) else (stream.record(), here.record())
