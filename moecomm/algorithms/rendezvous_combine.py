"""The phases of one rendezvous combine; see rendezvous.py for the order."""

from __future__ import annotations

import torch

from moecomm.algorithms.base import Returned
from moecomm.algorithms.calls import LANE_BEGUN, LANE_DONE, Call, Phase
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.routing import Routing
from moecomm.algorithms.signature import Operation, words_of
from moecomm.codecs.base import RowFormat

__all__ = ["Combine"]


class Combine:
    """One combine of one rank.

    Arguments:
        exchange: what calls share.
        y: `[N, H]` contiguous rows of the local experts.
        routing: complete.
        row_format: how rows are written.
        topk_weights: `[T, K]` contiguous, applied at home, or None.
        values: `[N]` or (flat) `[N, K]` contiguous, brought home route by route, or None.
    """

    def __init__(
        self,
        exchange: Exchange,
        y: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        *,
        topk_weights: torch.Tensor | None,
        values: torch.Tensor | None,
    ) -> None:
        self.exchange = exchange
        self.routing = routing
        self.row_format = row_format
        self.topk_weights = topk_weights
        self.values = values
        self.planes = row_format.encode(y)
        if values is not None:
            self.planes += (values,)
        words = words_of(routing, row_format, values)
        self.call = Call(Operation.COMBINE, words, self._phases, self, routing.recording)

    def _ready(self) -> None:
        exchange = self.exchange
        exchange.sequencer.await_readers(self.call)
        exchange.sequencer.release_quarantine()
        offsets, self.call.blocks, need = exchange.memory.share(self.planes)
        exchange.sequencer.send_card(self.call, offsets, need, exchange.memory.limit, refused=need > 0)

    def _pull(self) -> None:
        exchange, routing = self.exchange, self.routing
        cards = exchange.sequencer.cards(self.call)
        for rank, card in enumerate(cards):
            if card.refused:
                raise exchange.exceeded(self.call, rank, card.need, card.limit)
        bases = exchange.bases
        addresses = [
            [base + card.offsets[plane] for base, card in zip(bases, cards, strict=True)]
            for plane in range(len(self.planes))
        ]
        assert routing.routes is not None
        num_planes = len(self.row_format.plane_bytes)
        num_tokens = routing.routes.shape[0]
        out = self.row_format.reduce(num_tokens, routing.routes, addresses[:num_planes], self.topk_weights)
        values = None if self.values is None else self._pull_values(self.values.dtype, addresses[num_planes])
        # What was read while its owner gave up is worth nothing.
        exchange.sequencer.check_notices(self.call)
        self.call.result = Returned(out, values)
        exchange.sequencer.signal_all(LANE_DONE, self.call)

    def _pull_values(self, dtype: torch.dtype, addresses: list[int]) -> torch.Tensor:
        kernels, routing = self.exchange.kernels, self.routing
        assert routing.routes is not None
        if routing.layout == "flat":
            expert_rank = self.exchange.placement.expert_rank
            return kernels.pull_flat_values(routing.topk_idx, routing.routes, expert_rank, addresses, dtype=dtype)
        return kernels.pull_values(routing.routes, addresses, dtype=dtype)

    def _release(self) -> None:
        self.exchange.sequencer.check_notices(self.call)
        self.call.blocks = ()

    _phases = (Phase("ready", None, _ready), Phase("pull", LANE_BEGUN, _pull), Phase("release", LANE_DONE, _release))
