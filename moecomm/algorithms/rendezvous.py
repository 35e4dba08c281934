"""Algorithm `rendezvous` (throughput): sizes first, then each row is written once, straight to its final place.

dispatch   announce  my counts go to every peer
           grant     all counts known: set receive memory aside and tell the peers where
           push      all places known: write my rows there, in source order
           arrive    everybody has written: the rows are views of receive memory
dispatch with a handle: the first two are one, for no counts are exchanged
combine    ready     say where the experts' rows are (they stay where they are if peers can read them there)
           pull      everybody is ready: read my tokens' rows and sum them
           release   everybody has read: the rows may change again
combine where some ranks cannot address each other: after `ready` comes
           send home everybody is ready: send rows of far ranks' tokens to the memory that those have set aside
"""

from __future__ import annotations

import torch

from moecomm.algorithms.base import Algorithm
from moecomm.algorithms.calls import Call
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.rendezvous_combine import Combine
from moecomm.algorithms.rendezvous_dispatch import Dispatch
from moecomm.algorithms.routing import Routing
from moecomm.codecs.base import RowFormat

__all__ = ["Rendezvous"]


class Rendezvous(Algorithm):
    """The throughput exchange.

    Arguments:
        exchange: what calls share.
    """

    name = "rendezvous"

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def check_size(self, num_tokens: int) -> None:
        """Any number will do."""

    def capacity(self, layout: str, expert_alignment: int) -> int:
        return 0

    def begin_dispatch(
        self, x: torch.Tensor, routing: Routing, row_format: RowFormat, topk_weights: torch.Tensor | None
    ) -> Call:
        return self._exchange.sequencer.begin(Dispatch(self._exchange, x, routing, row_format, topk_weights).call)

    def begin_combine(
        self,
        y: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        *,
        topk_weights: torch.Tensor | None,
        values: torch.Tensor | None,
        may_change: bool,
        per_host: bool = False,
    ) -> Call:
        combine = Combine(
            self._exchange, y, routing, row_format, topk_weights=topk_weights, values=values, per_host=per_host
        )
        return self._exchange.sequencer.begin(combine.call)
