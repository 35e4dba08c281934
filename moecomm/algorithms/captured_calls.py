"""The phases of low-latency calls that the device makes by itself; see captured.py."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moecomm.algorithms.base import Arrival, Returned
from moecomm.algorithms.calls import Call, Phase
from moecomm.algorithms.captured_blocks import Lease
from moecomm.algorithms.eager_sizes import EagerForm
from moecomm.algorithms.routing import DeviceRouting, Routing
from moecomm.algorithms.signature import Operation
from moecomm.codecs.base import RowFormat
from moecomm.devices.base import AsynchronousDevice
from moecomm.devices.queue import OrderedQueue
from moecomm.placement import Placement

if TYPE_CHECKING:
    from moecomm.algorithms.captured import Captured

__all__ = ["CapturedCombine", "CapturedDispatch", "FilledBlock", "arrival_in"]


class FilledBlock(NamedTuple):
    """What a dispatch leaves on the device.

    Attributes:
        lease: of the memory.
        placed: what the kernels tell of its rows.
        answered: what they want when rows go home.
        device: where it is.
        placement: which rank hosts which expert.
        room: memory that `answered` has for itself, with its `counts` and `routes`; None: it is the lease's.
    """

    lease: Lease
    placed: Any
    answered: Any
    device: AsynchronousDevice
    placement: Placement
    room: torch.Tensor | None = None


def arrival_in(
    block: FilledBlock, form: EagerForm, row_format: RowFormat, routing: Routing, ids: torch.Tensor, call: Call
) -> Arrival:
    """What has arrived; tensors keep the lease.

    Arguments:
        routing: if it is complete, it stays; else it becomes what the device knows.
        ids: `[T, K]`, which the caller does not change.
        call: that has brought it.
    """
    lease, placed, device = block.lease, block.placed, block.device
    first, arrived = lease.memory.address, placed.arrived

    def shared(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
        return device.view(tensor.data_ptr(), lease, tensor.dtype, shape or tensor.shape)

    given = lease.give_out(lambda dtype, at, shape: device.view(first + at, lease, dtype, shape), form, row_format)
    tokens = shared(arrived.num_tokens_per_expert)
    offsets = shared(arrived.offsets) if routing.layout == "expert_major" else None
    routing = routing._replace(recording=False, changed=None)  # which are the call's
    if routing.routes is None:
        answered = block.answered
        if block.room is None:
            counts, routes = shared(arrived.counts), shared(placed.routes, *ids.shape)
        else:
            counts, routes = answered.counts, answered.routes
        known = DeviceRouting(block.placement, counts, answered, lease if block.room is None else block.room)
        routing = routing._replace(topk_idx=ids, routes=routes, origin=call.sequence, on_device=known)
    return Arrival(*given, tokens, offsets, routing)


class CapturedDispatch:
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
        home: Captured,
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
        self.lease = home.lease(self.form)
        self.placed = self.lease.captured.placed
        self.call = Call(Operation.EAGER_DISPATCH, (), self._phases, self, by_device=True)

    def prepare(self, queue: OrderedQueue) -> None:
        """Before the device's work: room for results, and what must live until it is done."""
        call, ids = self.call, self.routing.topk_idx
        queue.keep(call, self.rows, ids, self.topk_weights)
        self.ids = ids
        if self.routing.routes is None:  # the user's may change, what the handle says may not
            self.ids = queue.room(call, ids.shape, torch.int32)

    def _send(self) -> None:
        queue, kernels, ids = self.home.queue, self.home.kernels, self.routing.topk_idx
        self.home.pool.clean(self.lease)
        queue.run(functools.partial(kernels.send, topk_weights=self.topk_weights), self.rows, ids, self.lease.captured)
        if self.ids is not ids:
            queue.run(self.ids.copy_, ids)

    def _receive(self) -> None:
        home = self.home
        home.queue.run(home.kernels.receive, self.lease.captured)
        block = FilledBlock(self.lease, self.placed, self.placed, home.device, home.placement)
        self.call.result = arrival_in(block, self.form, self.row_format, self.routing, self.ids, self.call)

    _phases = (Phase("send", None, _send), Phase("receive", None, _receive))


class CapturedCombine:
    """One combine of one rank. Rows are copied to where peers read them, and may change once the call is done here.

    Arguments:
        home: what calls share.
        y: `[N, H]` contiguous rows of the local experts, in any number of dimensions.
        routing: complete, with what the device knows.
        row_format: how rows are written.
        topk_weights: `[T, K]` contiguous, applied at home, or None.

    Attributes:
        placed: what it uses, as no other call in flight does.
    """

    def __init__(
        self,
        home: Captured,
        y: torch.Tensor,
        known: DeviceRouting,
        routing: Routing,
        row_format: RowFormat,
        topk_weights: torch.Tensor | None,
    ) -> None:
        self.home = home
        (self.rows,) = row_format.encode(y)
        self.known = known
        self.placed = known.placed
        self.shape = (routing.topk_idx.shape[0], row_format.hidden)
        self.dtype = row_format.dtype
        self.topk_weights = topk_weights
        self.call = Call(Operation.EAGER_COMBINE, (), self._phases, self, by_device=True)

    def prepare(self, queue: OrderedQueue) -> None:
        """Before the device's work: room for results, and what must live until it is done."""
        queue.keep(self.call, self.rows, self.topk_weights)
        self.out = queue.room(self.call, self.shape, self.dtype)

    def _send(self) -> None:
        self.home.queue.run(self.home.kernels.send_rows, self.rows, self.placed)

    def _receive(self) -> None:
        sums = functools.partial(self.home.kernels.sum_rows, topk_weights=self.topk_weights)
        self.home.queue.run(sums, self.placed, self.out)
        self.call.result = Returned(self.out, None)

    _phases = (Phase("send", None, _send), Phase("receive", None, _receive))
