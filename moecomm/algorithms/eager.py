"""Algorithm `eager` (low latency): counts travel with the data; fixed windows; every shape is fixed.

dispatch   send      ids, weights and each row once per destination rank into my windows at the peers
           receive   everybody has sent: count, and copy the rows to their places
combine    send      say where the experts' rows are (they stay where they are if peers can read them there)
           receive   everybody has sent: read my tokens' rows and sum them

Between domains, unless `algorithm` is `direct`, a message is one for a whole domain: it holds each row once that any
rank there wants, and goes to the sender's rail there. Nobody passes it on: the rail's neighbours address its memory,
and each picks its own rows from the one message, as the rail does. That it has come they see on the rail's counters,
which have an address, too; so they depend on the rail's transport alone, not on how far the rail is with its own calls.
The card of the call crosses to every rank, in front of the message if that rank gets one. A combine's rows cross to the
ranks that they belong to: one per route, whichever way they go, for only home may add them in the order that is
promised. They go to the window of their sender there, as a message, or to memory for more where that has no room.

Call n uses window n mod 2k, where k = max_in_flight. That is enough, and no fewer would do: before call n a rank has
finished call n - k, so every peer has sent in call n - k, so it has finished call n - 2k, whose window comes next.
Every peer: also those that read the window from beside, which belongs to the rail. A rank that leaves takes no window
away from them, as memory goes when the last process lets go of it.
"""

from __future__ import annotations

import torch

from moecomm.algorithms.base import Algorithm
from moecomm.algorithms.calls import Call
from moecomm.algorithms.eager_combine import EagerCombine
from moecomm.algorithms.eager_dispatch import EagerDispatch
from moecomm.algorithms.eager_sizes import EagerSizes
from moecomm.algorithms.eager_windows import EagerTools, Windows
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.holder_lanes import HolderLanes
from moecomm.algorithms.message_holders import MessageHolders
from moecomm.algorithms.routing import Routing
from moecomm.codecs.base import RowFormat
from moecomm.kernels.eager import Home
from moecomm.topology import Topology

__all__ = ["Eager"]


class Eager(Algorithm):
    """The low-latency exchange. Construction is collective.

    Arguments:
        exchange: what calls share.
        topology: where the ranks are.
        sizes: the fixed shapes.
        max_in_flight: k.

    Attributes:
        tools: what its calls share.
    """

    name = "eager"

    def __init__(self, exchange: Exchange, topology: Topology, sizes: EagerSizes, max_in_flight: int) -> None:
        self._sizes = sizes
        num_windows = 2 * max_in_flight
        needed, most = num_windows * exchange.transport.num_ranks * sizes.window_bytes, exchange.smallest_limit // 4
        if not exchange.device.is_host and needed > most:
            # All exists at once there, and who never makes such a call should not pay for it.
            self.refusal = (
                f"mode 'low_latency' would take {needed} bytes of {exchange.device.kind} memory for windows of "
                f"max_tokens_per_rank={sizes.max_tokens_per_rank} tokens, and may take {most}, a quarter of the "
                "memory_limit; construct the Communicator with a smaller max_tokens_per_rank or a larger memory_limit"
            )
            return
        way = exchange.hops.way if exchange.device.is_host else "direct"  # kernels of devices read what is their rank's
        holders = MessageHolders(topology, exchange.placement, exchange.rank, way)
        if not holders.over_rails:
            holders.expert_holder = exchange.expert_rank  # the same, on the device
        if holders.lanes:
            exchange.sequencer.holder_lanes = HolderLanes(exchange.transport, holders.lanes)
        exchange.hops.promise = holders.promise(sizes.max_topk) if topology.num_domains > 1 else None
        windows = Windows(exchange, sizes, num_windows=num_windows, holders=holders)
        # Where kernels cannot add to the session's counts they add to a copy.
        tokens = exchange.tokens_per_expert.to(exchange.device.torch_device)
        experts = exchange.expert_rank, exchange.expert_local
        home = Home(exchange.rank, *experts, tokens, holders.domain_experts, holders.domain_sources)
        self.tools = EagerTools(exchange, windows, sizes, exchange.device.eager_kernels(), home, holders)

    def check_size(self, num_tokens: int) -> None:
        if self.refusal:
            raise ValueError(self.refusal)
        self._sizes.check(num_tokens)

    def capacity(self, layout: str, expert_alignment: int) -> int:
        return self._sizes.rows(layout, expert_alignment)

    def begin_dispatch(
        self, x: torch.Tensor, routing: Routing, row_format: RowFormat, topk_weights: torch.Tensor | None
    ) -> Call:
        dispatch = EagerDispatch(self.tools, x, routing, row_format, topk_weights)
        return self.tools.exchange.sequencer.begin(dispatch.call)

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
        if per_host and self.tools.exchange.topology.num_domains > 1:
            # Sums must be asked for where they are made, so there is nothing to be had from a single hop.
            return self.tools.exchange.algorithms["throughput"].begin_combine(
                y,
                routing,
                row_format,
                topk_weights=topk_weights,
                values=values,
                may_change=may_change,
                per_host=per_host,
            )
        combine = EagerCombine(
            self.tools, y, routing, row_format, topk_weights=topk_weights, values=values, may_change=may_change
        )
        return self.tools.exchange.sequencer.begin(combine.call)
