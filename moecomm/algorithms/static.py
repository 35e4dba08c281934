"""Algorithm `static` (throughput of a device): calls of fixed shape by kernels alone, all others as in `rendezvous`.

dispatch   announce  my counts go to every peer, and where my block is; a signal
           push      wait for all signals, plan, my rows to their places; a signal
           arrive    wait for all signals
combine    ready     say where the experts' rows are; a signal
           pull      wait for all signals, read my tokens' rows and sum them; a signal
           release   wait for all signals: the rows may change again

As in `captured`, no number that changes between calls is the host's, so a graph can hold them. Whether kernels make a
call follows from what all ranks know alike: a capacity, and no operator's call. What autograd records is made as all
else, and so are the calls of its backward.
"""

from __future__ import annotations

import torch

from moecomm import _C
from moecomm.algorithms.captured import Captured
from moecomm.algorithms.captured_blocks import Lease
from moecomm.algorithms.device_algorithm import DeviceAlgorithm
from moecomm.algorithms.eager_sizes import EagerForm, EagerSizes
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.rendezvous import Rendezvous
from moecomm.algorithms.routing import Routing
from moecomm.algorithms.signature import Operation
from moecomm.algorithms.static_calls import StaticCombine, StaticDispatch
from moecomm.codecs.base import RowFormat
from moecomm.kernels.captured import StaticCalls

__all__ = ["Static"]


class Static(DeviceAlgorithm):
    """The throughput exchange of a device. Construction is collective.

    Arguments:
        exchange: what calls share.
        captured: makes low-latency calls, and has the blocks and counters that all calls by kernels share.
        sizes: fixed shapes of those.
        max_in_flight: calls that may be begun and not waited for.

    Attributes:
        captured: as given.
        memory: of the exchange.
        kernels: make the calls.
    """

    name = "static"
    dispatching, combining = Operation.DISPATCH, Operation.COMBINE

    def __init__(self, exchange: Exchange, captured: Captured, sizes: EagerSizes, max_in_flight: int) -> None:
        self.exchange = exchange
        self.hosted = Rendezvous(exchange)
        self._sizes = sizes
        self.captured = captured
        self.memory = exchange.memory
        transport, kernels = exchange.transport, captured.device.captured_kernels()
        num_ranks = transport.num_ranks
        nbytes = kernels.mailbox_bytes(
            num_ranks=num_ranks, num_experts=exchange.placement.num_experts, max_in_flight=max_in_flight
        )
        region = transport.allocate_on(captured.device, nbytes)
        mailboxes = [transport.peer(region, rank) or 0 for rank in range(num_ranks)]

        def make() -> StaticCalls:
            return kernels.make_static(captured.kernels, mailboxes=mailboxes, regions=exchange.bases)

        self.kernels = captured.queue.ask(make)

    # -- what calls share --------------------------------------------------------------------------------------------

    def form(self, routing: Routing, row_format: RowFormat, topk_weights: torch.Tensor | None) -> EagerForm:
        """What a dispatch brings here.

        Raises:
            MemoryLimitExceeded: it takes more than some rank may have; the same on all ranks.
        """
        value_bytes = 0 if topk_weights is None else topk_weights.element_size()
        how = (routing.layout, routing.capacity, routing.expert_alignment, row_format, routing.topk_idx.shape[1])
        form = self._sizes.form(*how, value_bytes)
        limit = self.exchange.smallest_limit
        if form.block.nbytes > limit:
            raise self.memory.exceeded("dispatch", "every rank", form.block.nbytes, limit)
        return form

    def lease(self, form: EagerForm, num_tokens: int) -> Lease:
        """A block for a dispatch of so many tokens that is about to begin; see `BlockPool.lease`."""
        most = 1 << max(0, num_tokens - 1).bit_length()  # few different ones, however many tokens there are

        def make(memory: _C.Block) -> object:
            ids_at = None if form.ids_at is None else memory.offset + form.ids_at
            return self.kernels.block(form.kernel, memory.offset, memory.offset + form.values_at, most, ids_at=ids_at)

        key = ("static", form.kernel, form.choices, most)
        return self.captured.pool.lease(key, form.block.nbytes, make, "dispatch")

    def lease_outputs(self, nbytes: int) -> Lease:
        """Memory for a copy of rows that peers are to read."""
        return self.captured.pool.lease(("outputs", nbytes), nbytes, lambda memory: None, "combine")

    # -- calls -------------------------------------------------------------------------------------------------------

    def check_size(self, num_tokens: int) -> None:
        """Any number will do."""

    def capacity(self, layout: str, expert_alignment: int) -> int:
        return 0

    def is_by_device(self, routing: Routing | None, *, is_hosted: bool, recording: bool, is_fixed: bool) -> bool:
        return not is_hosted and (is_fixed if routing is None else routing.on_device is not None)

    def make_dispatch(
        self, x: torch.Tensor, routing: Routing, row_format: RowFormat, topk_weights: torch.Tensor | None
    ) -> StaticDispatch:
        return StaticDispatch(self, x, routing, row_format, topk_weights)

    def make_combine(
        self,
        y: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        *,
        topk_weights: torch.Tensor | None,
        values: torch.Tensor | None,
        per_host: bool,
    ) -> StaticCombine:
        assert routing.on_device is not None
        how = (self, y, routing.on_device, routing, row_format)
        return StaticCombine(*how, topk_weights=topk_weights, values=values, per_host=per_host)
