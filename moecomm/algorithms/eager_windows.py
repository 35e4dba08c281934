"""Where low-latency messages arrive, and what the calls of that mode share."""

from __future__ import annotations

from typing import Any, NamedTuple

from moecomm.algorithms.eager_sizes import EagerSizes
from moecomm.algorithms.exchange import Exchange
from moecomm.kernels.eager import EagerKernels, Home

__all__ = ["EagerTools", "Windows"]


class Windows:
    """Where messages arrive. Construction is collective.

    Arguments:
        exchange: what calls share.
        sizes: the fixed shapes.
        num_windows: calls whose messages are kept.

    Attributes:
        num_windows: as given; call n uses window n modulo that.
        outgoing: per window the addresses of mine at the peers, by rank.
        incoming: per window the addresses of the peers' here, by rank.
        kept: per window what peers may still read of the call that used it last.
    """

    def __init__(self, exchange: Exchange, sizes: EagerSizes, num_windows: int) -> None:
        ranks, me, nbytes = range(exchange.transport.num_ranks), exchange.rank, sizes.window_bytes
        region = exchange.transport.allocate(num_windows * len(ranks) * nbytes)
        bases = [exchange.transport.peer(region, rank) or 0 for rank in ranks]

        def offset(window: int, source: int) -> int:
            return (window * len(ranks) + source) * nbytes

        self.num_windows = num_windows
        self.outgoing = [[base + offset(window, me) for base in bases] for window in range(num_windows)]
        self.incoming = [[bases[me] + offset(window, source) for source in ranks] for window in range(num_windows)]
        self.kept: list[Any] = [None] * num_windows


class EagerTools(NamedTuple):
    """What low-latency calls share.

    Attributes:
        exchange: what all calls share.
        windows: where messages arrive.
        sizes: the fixed shapes.
        kernels: send, sort what arrives, copy.
        home: who receives.
    """

    exchange: Exchange
    windows: Windows
    sizes: EagerSizes
    kernels: EagerKernels
    home: Home
