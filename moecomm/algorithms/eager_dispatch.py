"""The phases of one low-latency dispatch; see eager.py for the order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from moecomm import _C
from moecomm.algorithms.base import Arrival
from moecomm.algorithms.calls import LANE_BEGUN, Call, Phase
from moecomm.algorithms.eager_sizes import EagerSizes
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.fixed_blocks import FixedBlock
from moecomm.algorithms.plan import overflow_message
from moecomm.algorithms.routing import Routing
from moecomm.algorithms.signature import Operation, words_of
from moecomm.codecs.base import RowFormat
from moecomm.kernels.eager import Block, EagerKernels, Incoming, Overflow, Sorted

if TYPE_CHECKING:
    from moecomm.algorithms.eager import Windows

__all__ = ["EagerDispatch"]


class EagerDispatch:
    """One low-latency dispatch of one rank.

    Arguments:
        exchange: what calls share.
        windows: where messages arrive.
        sizes: the fixed shapes.
        kernels: send, and sort what arrives.
        x: `[T, H]` rows, last dimension contiguous.
        routing: with a capacity; if it is complete, what arrives keeps it.
        row_format: how rows are written; one plane.
        topk_weights: `[T, K]` contiguous, travelling with the rows, or None.
    """

    def __init__(
        self,
        exchange: Exchange,
        windows: Windows,
        sizes: EagerSizes,
        kernels: EagerKernels,
        x: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        topk_weights: torch.Tensor | None,
    ) -> None:
        self.exchange = exchange
        self.windows = windows
        self.kernels = kernels
        self.x = x
        self.routing = routing
        self.row_format = row_format
        self.topk_weights = topk_weights
        (row_bytes,) = row_format.plane_bytes
        value_bytes = 0 if topk_weights is None else topk_weights.element_size()
        self.form = sizes.form(routing.layout, routing.capacity, row_bytes, value_bytes)
        self.leased: FixedBlock | None = None
        words = words_of(routing, row_format, topk_weights)
        self.call = Call(Operation.EAGER_DISPATCH, words, self._phases, self, routing.recording)

    def _send(self) -> None:
        exchange, call = self.exchange, self.call
        exchange.sequencer.await_readers(call)
        self.windows.keep(call.sequence, None)
        (rows,) = self.row_format.encode(self.x)
        # Before anything is sent, so that the peers learn if there is no space.
        leased = exchange.fixed_blocks.lease(self.form.block.nbytes, self.form, self.form.num_used)
        self.ids, fingerprint = self.kernels.send_eager(
            rows,
            self.routing.topk_idx,
            self.topk_weights,
            exchange.placement.expert_rank,
            self.windows.outgoing(call.sequence),
        )
        self.stamp = (call.sequence, fingerprint)
        need, limit = self.form.block.nbytes, exchange.memory.fixed_limit
        exchange.sequencer.send_card(call, (rows.shape[0],), need, limit, refused=leased is None)
        self.leased = leased

    def _receive(self) -> None:
        exchange, routing, form = self.exchange, self.routing, self.form
        (num_tokens,) = exchange.offsets(self.call, 1)
        assert self.leased is not None
        address = self.leased.block.address
        block = Block(
            rows=address,
            values=address + form.block.offsets[1] if form.value_bytes else 0,
            used=self.leased.used,
            capacity=form.capacity,
            alignment=routing.expert_alignment,
            num_rows=form.num_rows,
            num_local=form.num_local,
        )
        incoming = Incoming(
            self.windows.incoming(self.call.sequence),
            num_tokens,
            routing.topk_idx.shape[1],
            form.row_bytes,
            form.value_bytes,
        )
        placement = exchange.placement
        try:
            found = self.kernels.receive_eager(
                incoming,
                block,
                placement.expert_rank,
                placement.expert_local,
                exchange.rank,
                exchange.tokens_per_expert,
            )
        except Overflow as overflow:
            raise self._overflow(overflow) from None
        x, values = self.leased.give_out(self._tensors)
        assert x is not None
        self.call.result = Arrival(
            x=x,
            topk_weights=values,
            topk_idx=None,
            num_tokens_per_expert=found.num_tokens_per_expert,
            offsets=found.offsets,
            routing=routing if routing.routes is not None else self._complete(found),
        )

    def _tensors(self, block: _C.Block) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the block holds, as tensors."""
        offsets, num_rows = self.form.block.offsets, self.form.num_rows
        x = self.row_format.decode(block, offsets[:1], num_rows)
        if self.topk_weights is None:
            return x, None
        dtype = self.topk_weights.dtype
        if num_rows == 0:
            return x, torch.empty(0, dtype=dtype)
        return x, torch.frombuffer(block, dtype=dtype, count=num_rows, offset=offsets[1])

    def _complete(self, found: Sorted) -> Routing:
        return Routing(
            topk_idx=self.ids,
            layout=self.routing.layout,
            expert_alignment=self.routing.expert_alignment,
            routes=found.routes,
            counts=found.counts,
            stamp=torch.from_numpy(np.array(self.stamp)),
            capacity=self.routing.capacity,
            origin=self.call.sequence,
        )

    def _overflow(self, overflow: Overflow) -> ValueError:
        self.call.is_agreed_failure = True
        what = f"expert {overflow.index}" if self.form.capacity else f"rank {overflow.index}"
        return ValueError(f"{self.call.title}: {overflow_message(what, overflow.need, overflow.room)}")

    _phases = (Phase("send", None, _send), Phase("receive", LANE_BEGUN, _receive))
