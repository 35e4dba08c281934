"""The phases of throughput calls that the device makes by itself; see static.py."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from moecomm.algorithms.base import Returned
from moecomm.algorithms.calls import Call, Phase
from moecomm.algorithms.captured_calls import FilledBlock, arrival_in
from moecomm.algorithms.routing import DeviceRouting, Routing
from moecomm.algorithms.signature import Operation, digest_of, words_of
from moecomm.codecs.base import RowFormat
from moecomm.devices.queue import OrderedQueue

if TYPE_CHECKING:
    from moecomm.algorithms.static import Static

__all__ = ["StaticCombine", "StaticDispatch"]

_ALIGNMENT = 16  # of rows that peers read in place


class StaticDispatch:
    """One dispatch of one rank. If autograd records it, the way home is copied: it is wanted longer than the rows are.

    Arguments:
        home: what calls share.
        x: `[T, H]` rows, last dimension contiguous.
        routing: with a capacity, `topk_idx` contiguous; if it is complete, what arrives keeps it.
        row_format: how rows are written; one plane.
        topk_weights: `[T, K]` contiguous, travelling with the rows, or None.

    Attributes:
        placed: what it uses, as no other call in flight does.
    """

    room: torch.Tensor | None = None

    def __init__(
        self,
        home: Static,
        x: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        topk_weights: torch.Tensor | None,
    ) -> None:
        self.home = home
        (self.rows,) = row_format.encode(x)
        self.routing = routing
        self.row_format = row_format
        self.topk_weights = topk_weights
        self.form = home.form(routing, row_format, topk_weights)
        self.lease = home.lease(self.form, routing.topk_idx.shape[0])
        self.placed = self.lease.captured
        operation = Operation.DISPATCH if routing.routes is None else Operation.CACHED_DISPATCH
        words = words_of(routing, row_format, topk_weights)
        self.signature = digest_of(operation, words)
        self.call = Call(operation, words, self._phases, self, routing.recording, by_device=True)
        self.call.recorded = routing.recording

    def prepare(self, queue: OrderedQueue) -> None:
        """Before the device's work: room for results, and what must live until it is done."""
        call, routing, ids = self.call, self.routing, self.routing.topk_idx
        queue.keep(call, self.rows, ids, self.topk_weights, routing.changed)
        self.ids = ids
        if routing.routes is None:  # the user's may change, what the handle says may not
            self.ids = queue.room(call, ids.shape, torch.int32)
        if routing.routes is None and routing.recording:
            num_words = self.home.kernels.answered_words(self.placed, ids.shape[0])
            self.room = queue.room(call, (num_words,), torch.int64)

    def _announce(self) -> None:
        home, ids = self.home, self.routing.topk_idx
        queue = home.captured.queue
        home.captured.pool.clean(self.lease)
        announce = functools.partial(home.kernels.announce, signature=self.signature, topk_weights=self.topk_weights)
        queue.run(functools.partial(announce, changed=self.routing.changed), self.rows, ids, self.placed)
        if self.ids is not ids:
            queue.run(self.ids.copy_, ids)

    def _push(self) -> None:
        self.home.captured.queue.run(self.home.kernels.push, self.placed)

    def _arrive(self) -> None:
        captured, kernels, answered = self.home.captured, self.home.kernels, self.placed.answered
        captured.queue.run(kernels.arrive, self.placed)
        if self.room is not None:
            answered = kernels.answered(self.placed, self.room, self.ids.shape[0])
            captured.queue.run(kernels.keep, self.placed, answered)
        where = (captured.device, captured.placement, self.room)
        block = FilledBlock(self.lease, self.placed.placed, answered, *where)
        self.call.result = arrival_in(block, self.form, self.row_format, self.routing, self.ids, self.call)

    _phases = (Phase("announce", None, _announce), Phase("push", None, _push), Phase("arrive", None, _arrive))


class StaticCombine:
    """One combine of one rank. Peers read rows where they lie, which is receive memory; others are copied there.

    So are the numbers that come home beside them.

    Arguments:
        home: what calls share.
        y: `[N, H]` contiguous rows of the local experts.
        known: what the device knows of the routing.
        routing: complete.
        row_format: how rows are written.
        topk_weights: `[T, K]` contiguous, applied at home, or None.
        values: `[N]` or (flat) `[N, K]` contiguous, brought home route by route, or None.
        per_host: the ranks must agree on it.

    Attributes:
        placed: what it uses, as no other call in flight does.
    """

    def __init__(
        self,
        home: Static,
        y: torch.Tensor,
        known: DeviceRouting,
        routing: Routing,
        row_format: RowFormat,
        *,
        topk_weights: torch.Tensor | None,
        values: torch.Tensor | None,
        per_host: bool,
    ) -> None:
        self.home = home
        (self.rows,) = row_format.encode(y)
        self.values = values
        self.known = known
        self.placed = known.placed
        self.routing = routing
        self.shape = (routing.topk_idx.shape[0], row_format.hidden)
        self.dtype = row_format.dtype
        self.topk_weights = topk_weights
        self.copies: list[torch.Tensor] = []
        self.place = self._place_of(self.rows)
        self.values_at = 0 if values is None else self._place_of(values)
        words = words_of(routing, row_format, values, weighted=topk_weights is not None, per_host=per_host)
        self.signature = digest_of(Operation.COMBINE, words)
        self.call = Call(Operation.COMBINE, words, self._phases, self, routing.recording, by_device=True)
        self.call.recorded = routing.recording

    def _place_of(self, plane: torch.Tensor) -> int:
        """The offset in receive memory at which peers read it: where it is, or where a copy will be."""
        home, nbytes = self.home, plane.nbytes
        if not nbytes:
            return 0
        place = home.memory.offset_of(plane)
        if place is None or place % _ALIGNMENT:
            lease = home.lease_outputs(nbytes)
            home.memory.num_copies += 1
            place = lease.memory.offset
            self.copies.append(home.captured.device.view(lease.memory.address, lease, torch.uint8, (nbytes,)))
        return place

    def prepare(self, queue: OrderedQueue) -> None:
        """Before the device's work: room for results, and what must live until it is done."""
        call, routing, owner = self.call, self.routing, self.known.owner
        queue.keep(call, self.rows, self.values, *self.copies, self.topk_weights, routing.topk_idx, routing.changed)
        queue.keep(call, owner if isinstance(owner, torch.Tensor) else None)
        self.out = queue.room(call, self.shape, self.dtype)
        self.back: torch.Tensor | None = None
        if self.values is not None:
            self.back = queue.room(call, routing.topk_idx.shape, self.values.dtype)

    def _ready(self) -> None:
        send = functools.partial(self.home.kernels.send_rows, place=self.place, signature=self.signature)
        beside = functools.partial(send, values=self.values, values_at=self.values_at, changed=self.routing.changed)
        self.home.captured.queue.run(beside, self.rows, self.placed)

    def _pull(self) -> None:
        ids = self.routing.topk_idx if self.routing.layout == "flat" else None
        pull = functools.partial(self.home.kernels.sum_rows, signature=self.signature, topk_weights=self.topk_weights)
        self.home.captured.queue.run(functools.partial(pull, home=self.back, topk_idx=ids), self.placed, self.out)

    def _release(self) -> None:
        self.home.captured.queue.run(self.home.kernels.release, self.placed)
        self.call.result = Returned(self.out, self.back)

    _phases = (Phase("ready", None, _ready), Phase("pull", None, _pull), Phase("release", None, _release))
