"""The phases of one low-latency dispatch; see eager.py for the order."""

from __future__ import annotations

import torch

from moecomm import _C
from moecomm.algorithms.base import Arrival
from moecomm.algorithms.calls import LANE_BEGUN, Call, Phase
from moecomm.algorithms.eager_windows import EagerTools
from moecomm.algorithms.fixed_blocks import FixedBlock
from moecomm.algorithms.mailbox import Parcel
from moecomm.algorithms.plan import overflow_message
from moecomm.algorithms.routing import Routing
from moecomm.algorithms.signature import Operation, origin_of
from moecomm.codecs.base import RowFormat
from moecomm.devices.queue import OrderedQueue, Rooms
from moecomm.devices.views import tensor_of
from moecomm.errors import CapacityExceeded
from moecomm.kernels.eager import Overflow, Sorted, message_bytes

__all__ = ["EagerDispatch"]

_OPERATION = Operation.EAGER_DISPATCH


class EagerDispatch:
    """One low-latency dispatch of one rank.

    Arguments:
        tools: what calls share.
        x: `[T, H]` rows, last dimension contiguous.
        routing: with a capacity, `topk_idx` contiguous; if it is complete, what arrives keeps it.
        row_format: how rows are written; one plane.
        topk_weights: `[T, K]` contiguous, travelling with the rows, or None.
    """

    id_rooms: Rooms | None = None
    rooms: Rooms | None = None

    def __init__(
        self,
        tools: EagerTools,
        x: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        topk_weights: torch.Tensor | None,
    ) -> None:
        self.tools = tools
        self.x = x
        self.routing = routing
        self.row_format = row_format
        self.topk_weights = topk_weights
        value_bytes = 0 if topk_weights is None else topk_weights.element_size()
        num_topk = routing.topk_idx.shape[1]
        self.form = tools.sizes.form(
            routing.layout, routing.capacity, routing.expert_alignment, row_format, num_topk, value_bytes
        )
        words = *self.form.words, origin_of(routing)
        self.call = Call(_OPERATION, words, self._phases, self, routing.recording)
        self.leased: FixedBlock | None = None

    def prepare(self, queue: OrderedQueue) -> None:
        """Before the device's work: room for results, and what must live until it is done."""
        call, routing = self.call, self.routing
        queue.keep(call, self.x, self.topk_weights, routing.topk_idx, routing.routes)
        local, choices = self.tools.exchange.tokens_per_expert.shape, routing.topk_idx.shape
        self.id_rooms = queue.room(call, choices, torch.int32), None
        counts = None  # goes to the host
        routes = queue.room(call, choices, torch.int64)
        self.rooms = counts, routes, queue.room(call, local, torch.int32), queue.room(call, local, torch.int32)

    def _send(self) -> None:
        exchange, windows, _, kernels, _, holders = self.tools
        call = self.call
        exchange.sequencer.await_readers(call)
        self.window = call.sequence % windows.num_windows
        windows.kept[self.window] = None
        (rows,) = self.row_format.encode(self.x)
        # Before anything is sent, so that the peers learn if there is no space.
        need = self.form.block.nbytes
        leased = exchange.fixed_blocks.lease(need, self.form.content)
        self.ids, self.fingerprint = exchange.queue.call(
            self.id_rooms,
            kernels.send_eager,
            rows,
            self.routing.topk_idx,
            self.topk_weights,
            holders.expert_holder,
            windows.outgoing[self.window],
        )
        # A message brings the card along; the others get it by itself.
        parcels = self._far_messages() if holders.far else []
        limit, refused = exchange.memory.fixed_limit, leased is None
        exchange.sequencer.send_card(call, (rows.shape[0],), need, limit, refused=refused, parcels=parcels)
        self.leased = leased

    def _far_messages(self) -> list[Parcel]:
        """Counts the messages to other domains; gives those that lie here so far."""
        exchange, windows, holders, form = *self.tools[:2], self.tools.holders, self.form.kernel
        experts, num_holders = exchange.placement.num_experts, len(holders.holders)
        counts = torch.empty(experts + num_holders, dtype=torch.int32)
        exchange.kernels.count_routes(self.ids, holders.expert_holder, num_holders, counts)
        head = message_bytes(self.ids.shape[0], form.num_topk, 0, form.value_bytes)
        parcels = []
        for place in holders.far:
            nbytes = head + int(counts[experts + place]) * form.row_bytes
            exchange.hops.between += nbytes
            holder = holders.holders[place]
            if holder in exchange.reach.far:
                parcels.append(windows.parcel(self.window, holder, nbytes))
        return parcels

    def _receive(self) -> None:
        exchange, windows, _, kernels, home, _ = self.tools
        routing, form, leased = self.routing, self.form, self.leased
        (num_tokens,) = exchange.offsets(self.call, 1)
        assert leased is not None
        rows = leased.block.address
        values = 0 if self.topk_weights is None else rows + form.block.offsets[1]
        window = windows.incoming[self.window]
        try:
            arguments = (home, form.kernel, window, num_tokens, rows, values, leased.used)
            found = exchange.queue.call(self.rooms, kernels.receive_eager, *arguments)
        except Overflow as overflow:
            raise self._overflow(overflow) from None
        if home.tokens_per_expert is not exchange.tokens_per_expert:
            arrived = found.counts[:, slice(*exchange.placement.expert_range(exchange.rank))].sum(dim=0)
            exchange.count_tokens(arrived.to(torch.int32).numpy())
        x, weights = leased.give_out(self._tensors)
        if routing.routes is None:
            routing = self._complete(found)
        self.call.result = Arrival(x, weights, None, found.num_tokens_per_expert, found.offsets, routing)

    def _tensors(self, block: _C.Block) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the block holds, as tensors."""
        offsets, shape = self.form.block.offsets, self.form.shape
        memory = self.tools.exchange.queue.tensors_in(self.call, block)
        x = self.row_format.decode(memory, offsets, *shape)
        if self.topk_weights is None:
            return x, None
        return x, tensor_of(memory, self.topk_weights.dtype, offsets[1], shape)

    def _complete(self, found: Sorted) -> Routing:
        _, layout, alignment, *_ = routing = self.routing
        known = found.routes, found.counts, None, routing.capacity, self.call.sequence, self.fingerprint
        return Routing(self.ids, layout, alignment, *known, mode=routing.mode)

    def _overflow(self, overflow: Overflow) -> CapacityExceeded:
        self.call.is_agreed_failure = True
        what = f"expert {overflow.index}" if self.form.kernel.capacity else f"rank {overflow.index}"
        message = overflow_message(what, overflow.need, overflow.room, "low_latency")
        return CapacityExceeded(f"{self.call.title}: {message}")

    _phases = (Phase("send", None, _send), Phase("receive", LANE_BEGUN, _receive, reads_holders=True))
