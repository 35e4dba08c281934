"""The phases of one low-latency combine; see eager.py for the order."""

from __future__ import annotations

import torch

from moecomm.algorithms.base import Returned
from moecomm.algorithms.calls import LANE_BEGUN, Call, Phase
from moecomm.algorithms.eager_windows import EagerTools
from moecomm.algorithms.homecoming import Homecoming
from moecomm.algorithms.mailbox import Parcel
from moecomm.algorithms.routing import Routing
from moecomm.algorithms.signature import Operation, words_of
from moecomm.codecs.base import RowFormat
from moecomm.devices.queue import OrderedQueue, Tensors

__all__ = ["EagerCombine"]

_OPERATION = Operation.EAGER_COMBINE


class EagerCombine:
    """One low-latency combine of one rank.

    Peers may read the rows until they have finished the call, which nobody waits for: the window keeps the memory until
    it is certain. Rows that lie in receive memory already are read in place and must not change before.

    Arguments:
        tools: what calls share.
        y: `[N, H]` contiguous rows of the local experts, in any number of dimensions.
        routing: complete.
        row_format: how rows are written.
        topk_weights: `[T, K]` contiguous, applied at home, or None.
        values: `[N]` contiguous, brought home route by route, or None.
        may_change: rows are copied wherever they lie.
    """

    out: torch.Tensor | None = None
    home: Tensors | None = None

    def __init__(
        self,
        tools: EagerTools,
        y: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        *,
        topk_weights: torch.Tensor | None,
        values: torch.Tensor | None,
        may_change: bool,
    ) -> None:
        self.tools = tools
        self.routing = routing
        self.row_format = row_format
        self.topk_weights = topk_weights
        self.values = values
        self.may_change = may_change
        self.planes, self.row_bytes = row_format.encode(y), row_format.plane_bytes
        if values is not None:
            self.planes += (values,)
            self.row_bytes += (values.element_size(),)
        self.far: Homecoming | None = None
        if not tools.exchange.reach.is_complete:
            self.far = Homecoming(tools.exchange, routing, self.row_bytes)
        words = words_of(routing, row_format, values, weighted=topk_weights is not None)
        self.call = Call(_OPERATION, words, self._phases, self, routing.recording)

    def prepare(self, queue: OrderedQueue) -> None:
        """Before the device's work: room for results, and what must live until it is done."""
        call, shape = self.call, self.routing.topk_idx.shape
        queue.keep(call, *self.planes, self.topk_weights, self.routing.routes)
        self.out = queue.room(call, (shape[0], self.row_format.hidden), self.row_format.dtype)
        if self.values is not None:
            self.home = (queue.room(call, shape, self.values.dtype),)

    def _send(self) -> None:
        exchange, windows, *_ = self.tools
        call = self.call
        exchange.sequencer.await_readers(call)
        self.window = call.sequence % windows.num_windows
        offsets: tuple[int, ...] = ()
        kept: tuple[object, ...] = ()
        missing = 0
        for plane, row_bytes in zip(self.planes, self.row_bytes, strict=True):
            offset, keeper = self._share(plane, row_bytes)
            if keeper is None:
                missing = missing or plane.nbytes
            offsets += (offset,)
            kept += (keeper,)
        parcels = [] if self.far is None else self._send_home(self.far)
        limit, refused = exchange.memory.fixed_limit, missing > 0
        exchange.sequencer.send_card(call, offsets, missing, limit, refused=refused, parcels=parcels)
        windows.kept[self.window] = kept

    def _send_home(self, far: Homecoming) -> list[Parcel]:
        """Sends what has no room in my windows at far ranks; gives the messages with the rest, which bring the card."""
        exchange, windows, *_ = self.tools
        parcels, sources = [], [plane.data_ptr() for plane in self.planes]
        for home in exchange.reach.far:
            address = windows.outbox(home)
            nbytes = far.pack_for(home, sources, address, windows.room)
            if nbytes <= windows.room:
                parcels.append(windows.parcel(self.window, home, nbytes))
            elif windows.landings is not None:
                far.send_to(home, sources, windows.landings, self.window * windows.landing_bytes)
        return parcels

    def _share(self, plane: torch.Tensor, row_bytes: int) -> tuple[int, object | None]:
        """Where peers can read the plane, and what keeps it there; (0, None) if there is no space for it."""
        exchange = self.tools.exchange
        memory, routing = exchange.memory, self.routing
        if plane.numel() == 0 or exchange.reach.is_alone:
            return 0, plane
        offset = None if self.may_change else memory.offset_of(plane)
        if offset is not None:
            return offset, plane
        block = memory.allocate_leaving(plane.nbytes)
        if block is None:
            return 0, None
        memory.num_copies += 1
        assert routing.counts is not None
        capacity = routing.capacity if routing.layout == "slab" else 0
        experts = exchange.placement.expert_range(exchange.rank)
        exchange.queue.run(
            self.tools.kernels.copy_expert_rows,
            block.address,
            plane,
            row_bytes,
            routing.counts,
            experts,
            capacity,
            routing.expert_alignment,
        )
        return block.offset, block

    def _receive(self) -> None:
        exchange, routing = self.tools.exchange, self.routing
        assert routing.routes is not None
        addresses = exchange.offsets(self.call, len(self.planes), exchange.bases)
        routes = routing.routes if self.far is None else self._readdress(self.far, addresses)
        num_planes = len(self.row_format.plane_bytes)
        out = exchange.queue.fill(
            self.out, self.row_format.reduce, routes.shape[0], routes, addresses[:num_planes], self.topk_weights
        )
        values = None
        if self.values is not None:
            (values,) = exchange.queue.make(self.home, self._pull_values, routes, addresses[num_planes])
        # What was read while its owner gave up is worth nothing.
        exchange.sequencer.check_notices(self.call)
        self.call.result = Returned(out, values)

    def _pull_values(self, routes: torch.Tensor, addresses: list[int]) -> Tensors:
        assert self.values is not None
        return (self.tools.exchange.kernels.pull_values(routes, addresses, dtype=self.values.dtype),)

    def _readdress(self, far: Homecoming, addresses: list[list[int]]) -> torch.Tensor:
        """Puts in where my own rows lie and where those of far ranks have landed; gives the routes that lead there."""
        exchange, windows, *_ = self.tools
        for where, plane in zip(addresses, self.planes, strict=True):
            where[exchange.rank] = plane.data_ptr()
        if windows.landings is not None:
            far.readdress(addresses, windows.landings.address + self.window * windows.landing_bytes)
            far.readdress_packed(addresses, windows.slots[self.window], windows.room)
        (routes,) = far.make_routes()
        return routes

    _phases = (Phase("send", None, _send), Phase("receive", LANE_BEGUN, _receive))
