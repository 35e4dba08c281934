"""The phases of one low-latency dispatch; see eager.py for the order."""

from __future__ import annotations

import torch

from moecomm import _C
from moecomm.algorithms.base import Arrival
from moecomm.algorithms.calls import LANE_BEGUN, Call, Phase
from moecomm.algorithms.eager_windows import EagerTools
from moecomm.algorithms.fixed_blocks import FixedBlock
from moecomm.algorithms.plan import overflow_message
from moecomm.algorithms.routing import Routing
from moecomm.algorithms.signature import Operation, words_of
from moecomm.codecs.base import RowFormat
from moecomm.kernels.eager import Block, Incoming, Overflow, Sorted

__all__ = ["EagerDispatch"]


class EagerDispatch:
    """One low-latency dispatch of one rank.

    Arguments:
        tools: what calls share.
        x: `[T, H]` rows, last dimension contiguous.
        routing: with a capacity, `topk_idx` contiguous; if it is complete, what arrives keeps it.
        row_format: how rows are written; one plane.
        topk_weights: `[T, K]` contiguous, travelling with the rows, or None.
    """

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
        self.form = tools.sizes.form(routing.layout, routing.capacity, row_format.row_bytes, value_bytes)
        words = words_of(routing, row_format, topk_weights)
        self.call = Call(Operation.EAGER_DISPATCH, words, self._phases, self, routing.recording)
        self.leased: FixedBlock | None = None

    def _send(self) -> None:
        exchange, windows, _, kernels = self.tools
        call = self.call
        exchange.sequencer.await_readers(call)
        self.window = call.sequence % windows.num_windows
        windows.kept[self.window] = None
        (rows,) = self.row_format.encode(self.x)
        # Before anything is sent, so that the peers learn if there is no space.
        need = self.form.block.nbytes
        leased = exchange.fixed_blocks.lease(need, self.form, self.form.num_used)
        self.ids, self.fingerprint = kernels.send_eager(
            rows,
            self.routing.topk_idx,
            self.topk_weights,
            exchange.placement.expert_rank,
            windows.outgoing[self.window],
        )
        exchange.sequencer.send_card(call, (rows.shape[0],), need, exchange.memory.fixed_limit, refused=leased is None)
        self.leased = leased

    def _receive(self) -> None:
        exchange, windows, _, kernels = self.tools
        routing, form = self.routing, self.form
        (num_tokens,) = exchange.offsets(self.call, 1)
        assert self.leased is not None
        rows = self.leased.block.address
        values = rows + form.block.offsets[1] if form.value_bytes else 0
        used, alignment = self.leased.used, routing.expert_alignment
        block = Block(rows, values, used, form.capacity, alignment, form.num_rows, form.num_local)
        incoming = Incoming(
            windows.incoming[self.window], num_tokens, routing.topk_idx.shape[1], form.row_bytes, form.value_bytes
        )
        placement = exchange.placement
        try:
            found = kernels.receive_eager(
                incoming,
                block,
                placement.expert_rank,
                placement.expert_local,
                exchange.rank,
                exchange.tokens_per_expert,
            )
        except Overflow as overflow:
            raise self._overflow(overflow) from None
        x, weights = self.leased.give_out(self._tensors)
        if routing.routes is None:
            routing = self._complete(found)
        self.call.result = Arrival(x, weights, None, found.num_tokens_per_expert, found.offsets, routing)

    def _tensors(self, block: _C.Block) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the block holds, as tensors."""
        offsets, num_rows = self.form.block.offsets, self.form.num_rows
        x = self.row_format.decode(block, offsets, num_rows)
        if self.topk_weights is None:
            return x, None
        dtype = self.topk_weights.dtype
        if num_rows == 0:
            return x, torch.empty(0, dtype=dtype)
        return x, torch.frombuffer(block, dtype=dtype, count=num_rows, offset=offsets[1])

    def _complete(self, found: Sorted) -> Routing:
        _, layout, alignment, *_ = routing = self.routing
        origin = self.call.sequence
        return Routing(
            self.ids, layout, alignment, found.routes, found.counts, None, routing.capacity, origin, self.fingerprint
        )

    def _overflow(self, overflow: Overflow) -> ValueError:
        self.call.is_agreed_failure = True
        what = f"expert {overflow.index}" if self.form.capacity else f"rank {overflow.index}"
        return ValueError(f"{self.call.title}: {overflow_message(what, overflow.need, overflow.room)}")

    _phases = (Phase("send", None, _send), Phase("receive", LANE_BEGUN, _receive))
