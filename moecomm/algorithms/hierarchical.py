"""Algorithm `hierarchical` (throughput, between domains): each token's row crosses once per domain, not once per rank.

A domain is a set of ranks that address each other's memory: the ranks of a host, say. In each other domain a rank has a
rail: the rank of the same local index.

dispatch   announce, grant   as in rendezvous.py
           push              write what stays in my domain; send each other domain's rows to my rail there, in chunks;
                             write the rows that come from those whose rail I am to their places: all at once, whatever
                             can go on goes on, until my domain has written
           arrive            as there; ranks of other domains write nothing here, so they are not waited for
combine    ready             as there
           send home         ask my rails for rows of their domains, or sums of them, in chunks; answer those who ask
           pull              my rails have answered: sum
           release           as there

A call goes from rank to rank instead where that moves fewer bytes between domains. All ranks know the numbers; each
guesses from its own, and if they speak for rails, first chunks leave with the announcement.
"""

from __future__ import annotations

import torch

from moecomm.algorithms.base import Algorithm
from moecomm.algorithms.calls import Call
from moecomm.algorithms.channels import Channels
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.hierarchical_combine import HierarchicalCombine
from moecomm.algorithms.hierarchical_dispatch import HierarchicalDispatch
from moecomm.algorithms.rails import Rails
from moecomm.algorithms.routing import Routing
from moecomm.codecs.base import RowFormat
from moecomm.topology import Topology

__all__ = ["Hierarchical"]

_WIDEST_NUMBER = 8
_ID_BYTES = 4


class Hierarchical(Algorithm):
    """The throughput exchange between domains. Construction is collective.

    Arguments:
        exchange: what calls share.
        topology: at least 2 domains; the ranks of each must be able to address each other.
        hidden, max_topk: the most H and K of a call.
    """

    name = "hierarchical"

    def __init__(self, exchange: Exchange, topology: Topology, *, hidden: int, max_topk: int) -> None:
        self._exchange = exchange
        entry_bytes = hidden * _WIDEST_NUMBER + max_topk * (_ID_BYTES + _WIDEST_NUMBER)
        self.channels = Channels(exchange.transport, topology, entry_bytes)
        self.rails = Rails(topology, exchange.placement, exchange.rank)

    def check_size(self, num_tokens: int) -> None:
        """Any number will do."""

    def capacity(self, layout: str, expert_alignment: int) -> int:
        return 0

    def begin_dispatch(
        self, x: torch.Tensor, routing: Routing, row_format: RowFormat, topk_weights: torch.Tensor | None
    ) -> Call:
        dispatch = HierarchicalDispatch(self._exchange, x, routing, row_format, topk_weights, self.channels, self.rails)
        return self._exchange.sequencer.begin(dispatch.call)

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
        combine = HierarchicalCombine(
            self._exchange,
            y,
            routing,
            row_format,
            topk_weights=topk_weights,
            values=values,
            per_host=per_host,
            channels=self.channels,
            rails=self.rails,
        )
        return self._exchange.sequencer.begin(combine.call)
