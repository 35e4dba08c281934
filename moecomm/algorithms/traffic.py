"""What one call sends through the channels of a rank and takes out of them, in whatever order it comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from moecomm.algorithms.channels import Channels, Chunk

__all__ = ["Outgoing", "Traffic"]


class Outgoing(Protocol):
    """The chunks of a call to one rail.

    Attributes:
        rail: to whom they go.
    """

    rail: int

    def write_next(self, outbox: int) -> tuple[Chunk, int]:
        """Writes the arrays of the next chunk to an address; gives the chunk, and the bytes written."""
        ...


class Traffic:
    """The chunks of one call of one rank.

    Arguments:
        channels: of the rank.
        sequence: number of the call.
        outgoing: what goes to each rail that gets something.
        is_answered: the call is not finished before the rails have handled what was sent.
    """

    def __init__(
        self,
        channels: Channels,
        sequence: int,
        outgoing: Sequence[Outgoing],
        *,
        is_answered: bool = False,
    ) -> None:
        self._channels = channels
        self._sequence = sequence
        self._outgoing = list(outgoing)
        self._incoming: dict[int, Callable[[Chunk], None]] = {}
        self._unanswered = [one.rail for one in outgoing] if is_answered else []

    def send(self, most_chunks: int | None = None) -> None:
        """Sends what there is room for, at most so many chunks to each rail, and handles nothing yet."""
        while most_chunks != 0 and self._send():
            most_chunks = None if most_chunks is None else most_chunks - 1

    def expect(self, incoming: Mapping[int, Callable[[Chunk], None]]) -> None:
        """Says what handles the chunks of each rank from which some come; they may be overwritten afterwards."""
        self._incoming = dict(incoming)

    def advance(self) -> bool:
        """Sends and handles what can be without waiting; True once nothing is left."""
        moved = True
        while moved:
            moved = self._send() | self._handle()
        self._unanswered = [rail for rail in self._unanswered if self._owes(rail)]
        return not (self._outgoing or self._incoming or self._unanswered)

    def awaited(self) -> tuple[int, ...]:
        """The ranks without which nothing goes on, ascending."""
        return tuple(sorted({*(one.rail for one in self._outgoing), *self._incoming, *self._unanswered}))

    def _owes(self, rail: int) -> bool:
        return any(one.rail == rail for one in self._outgoing) or self._channels.num_unanswered(rail) > 0

    def _send(self) -> bool:
        """One chunk to each rail that has a place for it, so that what comes in does not wait long."""
        channels = self._channels
        ready = [one for one in self._outgoing if channels.may_send(one.rail)]
        for one in ready:
            chunk, nbytes = one.write_next(channels.outbox)
            channels.send(one.rail, self._sequence, chunk, nbytes)
            if chunk.is_last:
                self._outgoing.remove(one)
        return bool(ready)

    def _handle(self) -> bool:
        """One chunk of each rank from which one has come."""
        moved = False
        for source, handle in list(self._incoming.items()):
            chunk = self._channels.next_chunk(source, self._sequence)
            if chunk is None:
                continue
            moved = True
            handle(chunk)
            self._channels.take(source, is_last=chunk.is_last)
            if chunk.is_last:
                del self._incoming[source]
        return moved
