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
    """One dispatch of one rank.

    Arguments:
        home: what calls share.
        x: `[T, H]` rows, last dimension contiguous.
        routing: with a capacity, `topk_idx` contiguous; if it is complete, what arrives keeps it.
        row_format: how rows are written; one plane.
        topk_weights: `[T, K]` contiguous, travelling with the rows, or None.

    Attributes:
        placed: what it uses, as no other call in flight does.
    """

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
        self.call = Call(operation, words, self._phases, self, by_device=True)

    def prepare(self, queue: OrderedQueue) -> None:
        """Before the device's work: room for results, and what must live until it is done."""
        call, ids = self.call, self.routing.topk_idx
        queue.keep(call, self.rows, ids, self.topk_weights)
        self.ids = ids
        if self.routing.routes is None:  # the user's may change, what the handle says may not
            self.ids = queue.room(call, ids.shape, torch.int32)

    def _announce(self) -> None:
        home, ids = self.home, self.routing.topk_idx
        queue = home.captured.queue
        home.captured.pool.clean(self.lease)
        announce = functools.partial(home.kernels.announce, signature=self.signature, topk_weights=self.topk_weights)
        queue.run(announce, self.rows, ids, self.placed)
        if self.ids is not ids:
            queue.run(self.ids.copy_, ids)

    def _push(self) -> None:
        self.home.captured.queue.run(self.home.kernels.push, self.placed)

    def _arrive(self) -> None:
        captured = self.home.captured
        captured.queue.run(self.home.kernels.arrive, self.placed)
        block = FilledBlock(self.lease, self.placed.placed, self.placed, captured.device, captured.placement)
        self.call.result = arrival_in(block, self.form, self.row_format, self.routing, self.ids, self.call)

    _phases = (Phase("announce", None, _announce), Phase("push", None, _push), Phase("arrive", None, _arrive))


class StaticCombine:
    """One combine of one rank. Peers read rows where they lie, which is receive memory; others are copied there.

    Arguments:
        home: what calls share.
        y: `[N, H]` contiguous rows of the local experts.
        known: what the device knows of the routing.
        routing: complete.
        row_format: how rows are written.
        topk_weights: `[T, K]` contiguous, applied at home, or None.
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
        topk_weights: torch.Tensor | None,
        *,
        per_host: bool,
    ) -> None:
        self.home = home
        (self.rows,) = row_format.encode(y)
        self.placed = known.placed
        self.shape = (routing.topk_idx.shape[0], row_format.hidden)
        self.dtype = row_format.dtype
        self.topk_weights = topk_weights
        self.copies: torch.Tensor | None = None
        place = home.memory.offset_of(self.rows)
        if place is None or place % _ALIGNMENT:
            lease = home.lease_outputs(self.rows.nbytes)
            home.memory.num_copies += 1
            place = lease.memory.offset
            self.copies = home.captured.device.view(lease.memory.address, lease, torch.uint8, (self.rows.nbytes,))
        self.place = place
        words = words_of(routing, row_format, None, per_host=per_host)
        self.signature = digest_of(Operation.COMBINE, words)
        self.call = Call(Operation.COMBINE, words, self._phases, self, by_device=True)

    def prepare(self, queue: OrderedQueue) -> None:
        """Before the device's work: room for results, and what must live until it is done."""
        queue.keep(self.call, self.rows, self.copies, self.topk_weights)
        self.out = queue.room(self.call, self.shape, self.dtype)

    def _ready(self) -> None:
        send = functools.partial(self.home.kernels.send_rows, place=self.place, signature=self.signature)
        self.home.captured.queue.run(send, self.rows, self.placed)

    def _pull(self) -> None:
        pull = functools.partial(self.home.kernels.sum_rows, signature=self.signature, topk_weights=self.topk_weights)
        self.home.captured.queue.run(pull, self.placed, self.out)

    def _release(self) -> None:
        self.home.captured.queue.run(self.home.kernels.release, self.placed)
        self.call.result = Returned(self.out, None)

    _phases = (Phase("ready", None, _ready), Phase("pull", None, _pull), Phase("release", None, _release))
