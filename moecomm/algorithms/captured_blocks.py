"""Blocks for the rows of calls that the device makes by itself.

A block stays what it is once it is made: memory, and on the device what kernels know of it, such as which rows hold
something. So it is zeroed once, and used again for calls of the same form as soon as nobody has tensors of it.

A graph writes to the same addresses whenever it is replayed, so a block that was used in a capture serves no other
calls than those of captures from then on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from moecomm import _C
from moecomm.algorithms.eager_sizes import EagerForm
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.fixed_blocks import Watch, watched
from moecomm.codecs.base import RowFormat
from moecomm.devices.base import Event
from moecomm.devices.queue import OrderedQueue
from moecomm.devices.views import Placed, tensor_of

__all__ = ["BlockPool", "Given", "Lease"]


class _Kept:
    """One block.

    Attributes:
        memory: of rows and weights.
        captured: the kernels' block, if they keep one.
        for_graphs: it was used in a capture.
        watches: what shows whether somebody has written to the tensors given out last.
        events: after which it may be written to.
    """

    __slots__ = ("captured", "events", "for_graphs", "memory", "watches")

    def __init__(self, memory: _C.Block, captured: Any) -> None:
        self.memory = memory
        self.captured = captured
        self.for_graphs = False
        self.watches: tuple[Watch, ...] = ()
        self.events: tuple[Event, ...] = ()


class Given(NamedTuple):
    """What of a block is given out: rows, weights if they travel, local ids if the layout is flat."""

    x: torch.Tensor
    topk_weights: torch.Tensor | None
    topk_idx: torch.Tensor | None


class _Idle(NamedTuple):
    """Blocks of one form that nobody uses. Tensors die anywhere, so nothing here takes a lock."""

    others: deque[_Kept]
    graphs: deque[_Kept]


class Lease:
    """What the tensors of a block, and handles of its rows, keep alive.

    Arguments:
        kept: the block.
        idle: where it goes when this dies.
        end_of_use: gives the events after which it is free; called once, in any thread.

    Attributes:
        captured: the kernels' block, if they keep one.
        memory: of rows and weights.
    """

    __slots__ = ("_end_of_use", "_idle", "_kept", "captured", "memory")

    def __init__(self, kept: _Kept, idle: _Idle, end_of_use: Callable[[], tuple[Event, ...]]) -> None:
        self._kept = kept
        self._idle = idle
        self._end_of_use = end_of_use
        self.captured = kept.captured
        self.memory = kept.memory

    def give_out(
        self, view: Callable[[torch.dtype, int, Sequence[int]], torch.Tensor], form: EagerForm, row_format: RowFormat
    ) -> Given:
        """What is in the block, once it is filled; torch counts the writes to it."""

        def make() -> Given:
            placed, weights, ids = Placed(view), None, None
            if form.kernel.value_bytes:
                dtype = torch.float64 if form.kernel.value_bytes == 8 else torch.float32
                weights = tensor_of(placed, dtype, form.values_at, form.choices)
            if form.ids_at is not None:
                ids = tensor_of(placed, torch.int32, form.ids_at, form.choices)
            return Given(row_format.decode(placed, form.block.offsets, *form.shape), weights, ids)

        given, self._kept.watches = watched(make)
        return given

    def is_intact(self) -> bool:
        """Whether nobody has written to the tensors that were given out before; asked once."""
        watches, self._kept.watches = self._kept.watches, ()
        return all(watch.is_intact() for watch in watches)

    def __del__(self) -> None:
        kept = self._kept
        kept.events = self._end_of_use()
        (self._idle.graphs if kept.for_graphs else self._idle.others).append(kept)


class BlockPool:
    """The blocks of one communicator.

    Arguments:
        exchange: what calls share.
        queue: of it.
    """

    def __init__(self, exchange: Exchange, queue: OrderedQueue) -> None:
        self._exchange = exchange
        self._memory = exchange.memory
        self._queue = queue
        self._me = exchange.transport.describe_peer(exchange.rank)
        self._idle: dict[Hashable, _Idle] = {}

    def lease(self, key: Hashable, nbytes: int, make: Callable[[_C.Block], Any], title: str) -> Lease:
        """A block for a call that is about to begin on the caller's current stream, to be cleaned by its work.

        Arguments:
            key: a block that was made for an equal one will do.
            nbytes: of the block.
            make: gives what kernels keep of a new block, whose memory is zero.
            title: of the operation, for messages.

        Raises:
            MemoryLimitExceeded: there is no memory for one more.
            ValueError: one would have to be made while a graph is captured.
        """
        idle = self._idle.setdefault(key, _Idle(deque(), deque()))
        if self._queue.is_capturing():
            kept = self._captured(idle, title)
        elif idle.others:
            kept = idle.others.popleft()
            self._queue.come_after(kept.events)
        else:
            kept = self._made(nbytes, make, title)
        return Lease(kept, idle, self._queue.end_of_use())

    def clean(self, lease: Lease) -> None:
        """Lets the call that begins blank all that it does not fill, if somebody has written to what was given out."""
        if not lease.is_intact():
            self._queue.run(lease.captured.placed.distrust)

    def release(self) -> None:
        """Gives the memory of idle blocks back, but for those of graphs, unless a late peer may still write to it."""
        calls = self._exchange.device_calls
        if calls is not None and calls.has_failed:
            return
        for idle in self._idle.values():
            while idle.others:
                # Whatever comes there next is written to on our stream, or claimed behind our stream's work.
                self._queue.come_after(idle.others.popleft().events)

    def _captured(self, idle: _Idle, title: str) -> _Kept:
        if not idle.graphs and not idle.others:
            raise ValueError(
                f"{title}: no block is free for rows in a graph, and a capture makes none. Make the same calls once "
                "before it, and let go of what they gave, or of what other graphs of such calls gave"
            )
        kept = idle.graphs.popleft() if idle.graphs else idle.others.popleft()
        kept.for_graphs = True
        return kept

    def _made(self, nbytes: int, make: Callable[[_C.Block], Any], title: str) -> _Kept:
        memory = self._memory.allocate(nbytes)
        if memory is None:
            raise self._memory.exceeded(title, self._me, nbytes, self._memory.limit)
        self._queue.set_bytes(memory.address, nbytes, 0)
        return _Kept(memory, self._queue.ask(lambda: make(memory)))
