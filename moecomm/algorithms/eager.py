"""Algorithm `eager` (low latency): one hop; counts travel with the data; fixed windows; every shape is fixed.

dispatch   send      ids, weights and each row once per destination rank into my windows at the peers
           receive   everybody has sent: count, and copy the rows to their places
combine    send      say where the experts' rows are (they stay where they are if peers can read them there)
           receive   everybody has sent: read my tokens' rows and sum them

Call n uses window n mod 2k, where k = max_in_flight. That is enough, and no fewer would do: before call n a rank has
finished call n - k, so every peer has sent in call n - k, so it has finished call n - 2k, whose window comes next.
"""

from __future__ import annotations

from typing import Any

import torch

from moecomm.algorithms.base import Algorithm
from moecomm.algorithms.calls import Call
from moecomm.algorithms.eager_combine import EagerCombine
from moecomm.algorithms.eager_dispatch import EagerDispatch
from moecomm.algorithms.eager_sizes import EagerSizes
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.routing import Routing
from moecomm.codecs.base import RowFormat
from moecomm.kernels.registry import eager_kernels_for

__all__ = ["Eager", "Windows"]


class Windows:
    """Where messages arrive. Construction is collective.

    Arguments:
        exchange: what calls share.
        sizes: the fixed shapes.
        num_windows: calls whose messages are kept.
    """

    def __init__(self, exchange: Exchange, sizes: EagerSizes, num_windows: int) -> None:
        self._num_ranks = exchange.transport.num_ranks
        self._num_windows = num_windows
        self._window_bytes = sizes.window_bytes
        region = exchange.transport.allocate(num_windows * self._num_ranks * sizes.window_bytes)
        self._bases = [exchange.transport.peer(region, rank) or 0 for rank in range(self._num_ranks)]
        self._rank = exchange.rank
        self._kept: list[Any] = [None] * num_windows

    def keep(self, sequence: int, rows: Any) -> None:
        """Keeps what peers may still read of a call, and lets go of what was kept for an earlier one."""
        self._kept[sequence % self._num_windows] = rows

    def _offset(self, sequence: int, source: int) -> int:
        return (sequence % self._num_windows * self._num_ranks + source) * self._window_bytes

    def outgoing(self, sequence: int) -> list[int]:
        """Addresses of my windows at the peers, by rank."""
        offset = self._offset(sequence, self._rank)
        return [base + offset for base in self._bases]

    def incoming(self, sequence: int) -> list[int]:
        """Addresses of the peers' windows here, by rank."""
        base = self._bases[self._rank]
        return [base + self._offset(sequence, source) for source in range(self._num_ranks)]


class Eager(Algorithm):
    """The low-latency exchange. Construction is collective.

    Arguments:
        exchange: what calls share.
        sizes: the fixed shapes.
        max_in_flight: k.
    """

    name = "eager"

    def __init__(self, exchange: Exchange, sizes: EagerSizes, max_in_flight: int) -> None:
        self._exchange = exchange
        self._sizes = sizes
        self._windows = Windows(exchange, sizes, num_windows=2 * max_in_flight)
        self._kernels = eager_kernels_for("cpu")

    def check_size(self, num_tokens: int) -> None:
        self._sizes.check(num_tokens)

    def capacity(self, layout: str, expert_alignment: int) -> int:
        return self._sizes.rows(layout, expert_alignment)

    def begin_dispatch(
        self, x: torch.Tensor, routing: Routing, row_format: RowFormat, topk_weights: torch.Tensor | None
    ) -> Call:
        dispatch = EagerDispatch(
            self._exchange, self._windows, self._sizes, self._kernels, x, routing, row_format, topk_weights
        )
        return self._exchange.begin(dispatch.call)

    def begin_combine(
        self,
        y: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        *,
        topk_weights: torch.Tensor | None,
        values: torch.Tensor | None,
        may_change: bool,
    ) -> Call:
        combine = EagerCombine(
            self._exchange,
            self._windows,
            self._kernels,
            y,
            routing,
            row_format,
            topk_weights=topk_weights,
            values=values,
            may_change=may_change,
        )
        return self._exchange.begin(combine.call)
