"""Algorithm `hierarchical` for tensors on devices: each token's row crosses once per domain, and is passed on there.

dispatch  announce, grant  as in rendezvous.py; with the counts come those by domain, and a rail also sets memory aside
                           for what passes through it
          cross            all places known: pack what goes to other domains, put it to my rails; beside that, write
                           what stays in my domain
          forward          source by source, as its host has given its device the puts: behind each piece of them, find
                           the places of its rows and write them there
          arrive           as there
combine   ready            as there
          ask              all are ready: put ids and weights of my tokens to my rail in each domain
          answer           home by home, as it has asked: put its tokens' rows in my domain home, in pieces, and tell
                           it; their sum where all of a token's rows lie here, and a sum for each with
                           `reduce="per_host"`
          pull             my rails have answered: add up what has come, and rows of my own domain
          release          as there

A device begins when those have whose memory it reads or writes: of its domain, its rails, and in a combine its homes.
A rail waits only for those whose rows it passes on or whom it answers, on the host and on the device, where the work
for each runs beside that for the others: who is late holds up nobody else's rows. Whoever is to receive rows or answers
waits for the rails from which they come, and at the end for the devices of its domain.

Hosts give all of this to their devices beforehand. They know how many rows come from whom, never which: ids travel with
the rows, and only kernels read them. A call goes from rank to rank, as in rendezvous.py, where that moves fewer bytes
between domains.
"""

from __future__ import annotations

from typing import Any

import torch

from moecomm.algorithms.calls import Call
from moecomm.algorithms.device_exact_combine import DeviceExactCombine
from moecomm.algorithms.device_hierarchical_combine import DeviceHierarchicalCombine, DevicePerHostCombine
from moecomm.algorithms.device_hierarchical_dispatch import DeviceHierarchicalDispatch
from moecomm.algorithms.device_rails import DeviceRails
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.hops import Choice
from moecomm.algorithms.rendezvous import Rendezvous
from moecomm.algorithms.routing import Routing
from moecomm.codecs.base import RowFormat

__all__ = ["DeviceHierarchical"]

# By whether sums are made per host.
_KINDS: dict[bool, type[DeviceHierarchicalCombine]] = {False: DeviceExactCombine, True: DevicePerHostCombine}


class DeviceHierarchical(Rendezvous):
    """The throughput exchange of devices between domains.

    Arguments:
        exchange: what calls share; its topology is known, and some ranks cannot address each other.
    """

    name = "hierarchical"

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange)
        self._rails = DeviceRails(exchange)
        exchange.num_crossings = exchange.placement.num_ranks * 2 * exchange.topology.num_domains

    def begin_dispatch(
        self, x: torch.Tensor, routing: Routing, row_format: RowFormat, topk_weights: torch.Tensor | None
    ) -> Call:
        dispatch = DeviceHierarchicalDispatch(self._exchange, x, routing, row_format, topk_weights, self._rails)
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
        what: dict[str, Any] = {"topk_weights": topk_weights, "values": values}
        if per_host and not row_format.is_plain:
            raise ValueError(
                "reduce: 'per_host' adds up sums of other domains, which no codec has written; use 'exact'"
            )
        # Values alone are fewest bytes from rank to rank; and rows that a codec has written cannot be added to sums.
        if not row_format.hidden or not row_format.is_plain:
            return super().begin_combine(y, routing, row_format, **what, may_change=may_change)
        exchange, rails, kind = self._exchange, self._rails, _KINDS[per_host]
        costs = kind.costs(rails, routing, row_format, **what)
        is_over_rails = per_host or exchange.hops.prefers_rails(*costs)
        if is_over_rails:
            call = exchange.sequencer.begin(kind(exchange, y, routing, row_format, **what, rails=rails).call)
        else:
            call = super().begin_combine(y, routing, row_format, **what, may_change=may_change)
        # Rails read the rows that would cross from rank to rank.
        exchange.hops.note("combine", Choice(call.title, is_over_rails, *costs, costs[0]))
        return call
