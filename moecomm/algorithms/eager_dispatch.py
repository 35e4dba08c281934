"""The phases of one low-latency dispatch; see eager.py for the order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from moecomm.algorithms.base import Arrival
from moecomm.algorithms.calls import LANE_BEGUN, Call, Phase
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.mailbox import Card
from moecomm.algorithms.plan import block_layout
from moecomm.algorithms.routing import Routing
from moecomm.algorithms.signature import Operation, signature_of
from moecomm.codecs.base import RowFormat
from moecomm.errors import MemoryLimitExceeded
from moecomm.kernels.eager import Block, EagerKernels, Incoming, Overflow

if TYPE_CHECKING:
    from moecomm.algorithms.eager import Windows

__all__ = ["EagerDispatch"]


class EagerDispatch:
    """One low-latency dispatch of one rank.

    Arguments:
        exchange: what calls share.
        windows: where messages arrive.
        kernels: send, and sort what arrives.
        x: `[T, H]` rows, last dimension contiguous.
        routing: with a capacity; what else it holds of an earlier dispatch is found out anew.
        row_format: how rows are written; one plane.
        topk_weights: `[T, K]` contiguous, travelling with the rows, or None.
    """

    def __init__(
        self,
        exchange: Exchange,
        windows: Windows,
        kernels: EagerKernels,
        x: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        topk_weights: torch.Tensor | None,
    ) -> None:
        assert len(row_format.plane_bytes) == 1, "a low-latency message carries rows of one plane"
        self.exchange = exchange
        self.windows = windows
        self.kernels = kernels
        self.x = x
        self.routing = routing
        self.row_format = row_format
        self.topk_weights = topk_weights
        self.num_topk = routing.topk_idx.shape[1]
        self.call = Call(Operation.EAGER_DISPATCH, signature_of(routing, row_format, topk_weights))
        self.call.phases = (
            Phase("send", None, self._send),
            Phase("receive", LANE_BEGUN, self._receive),
        )

    def _send(self) -> None:
        exchange, call = self.exchange, self.call
        (rows,) = self.row_format.encode(self.x)
        exchange.sequencer.await_readers(call)
        self.ids, fingerprint = self.kernels.send_eager(
            rows,
            self.routing.topk_idx,
            self.topk_weights,
            exchange.placement.expert_rank,
            self.windows.outgoing(call.sequence),
        )
        self.stamp = (call.sequence, fingerprint)
        card = Card(call.sequence, call.operation, call.words, offsets=(rows.shape[0],))
        exchange.sequencer.send_card(card, call, with_counts=False)

    def _receive(self) -> None:
        exchange, routing = self.exchange, self.routing
        cards = exchange.sequencer.cards(self.call)
        (row_bytes,) = self.row_format.plane_bytes
        weights = self.topk_weights
        value_bytes = 0 if weights is None else weights.element_size()
        is_slab = routing.layout == "slab"
        first, end = exchange.placement.expert_range(exchange.rank)
        num_local = end - first
        num_rows = num_local * routing.capacity if is_slab else routing.capacity
        layout = block_layout(num_rows, (row_bytes, value_bytes))
        form = (row_bytes, value_bytes, routing.capacity, is_slab)
        leased = exchange.fixed_blocks.lease(layout.nbytes, form, max(1, num_local))
        if leased is None:
            raise MemoryLimitExceeded(
                f"{self.call.title}: no address space is left for a block of {layout.nbytes} bytes; let earlier "
                "results die, or construct the Communicator with a smaller max_tokens_per_rank"
            )
        address = leased.block.address
        block = Block(
            rows=address,
            values=address + layout.offsets[1] if value_bytes else 0,
            used=leased.used,
            capacity=routing.capacity if is_slab else 0,
            alignment=routing.expert_alignment,
            num_rows=routing.capacity,
            num_local=num_local,
        )
        incoming = Incoming(
            self.windows.incoming(self.call.sequence),
            [card.offsets[0] for card in cards],
            self.num_topk,
            row_bytes,
            value_bytes,
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
            raise self._overflow(overflow, is_slab) from None
        # What was read while its sender gave up, and went on to use the window again, is worth nothing.
        exchange.sequencer.check_notices(self.call)
        x = self.row_format.decode(leased.block, layout.offsets[:1], num_rows)
        values = None
        if weights is not None:
            values = _values(leased.block, weights.dtype, layout.offsets[1], num_rows)
        leased.watch(*((x,) if values is None else (x, values)))
        self.call.result = Arrival(
            x=x,
            topk_weights=values,
            topk_idx=None,
            num_tokens_per_expert=found.num_tokens_per_expert,
            offsets=found.offsets,
            routing=Routing(
                topk_idx=self.ids,
                layout=routing.layout,
                expert_alignment=routing.expert_alignment,
                routes=found.routes,
                counts=found.counts,
                stamp=torch.from_numpy(np.array(self.stamp)),
                capacity=routing.capacity,
                origin=self.call.sequence,
            ),
        )

    def _overflow(self, overflow: Overflow, is_slab: bool) -> ValueError:
        self.call.is_agreed_failure = True
        what = f"expert {overflow.index}" if is_slab else f"rank {overflow.index}"
        return ValueError(
            f"{self.call.title}: {overflow.need} rows for {what}, but there is room for {overflow.room}: tokens name "
            "experts of theirs more than once; remove the duplicates, or use mode='throughput'"
        )


def _values(block: object, dtype: torch.dtype, offset: int, num_rows: int) -> torch.Tensor:
    if num_rows == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(block, dtype=dtype, count=num_rows, offset=offset)
