"""Where low-latency messages arrive, and what the calls of that mode share."""

from __future__ import annotations

from typing import Any, NamedTuple

from moecomm import _C
from moecomm.algorithms.eager_sizes import EagerSizes
from moecomm.algorithms.exchange import Exchange
from moecomm.kernels.eager import EagerKernels, Home
from moecomm.transports.base import Region

__all__ = ["EagerTools", "Windows"]


class Windows:
    """Where messages arrive. Construction is collective.

    Arguments:
        exchange: what calls share.
        sizes: the fixed shapes.
        num_windows: calls whose messages are kept.

    Attributes:
        num_windows: as given; call n uses window n modulo that.
        outgoing: per window the addresses of mine at the peers, by rank; for far ranks, where what they are to get is
            written here first.
        incoming: per window the addresses of the peers' here, by rank.
        kept: per window what peers may still read of the call that used it last.
        landings: where rows from far ranks land in combines; None where nobody is far from anybody.
    """

    def __init__(self, exchange: Exchange, sizes: EagerSizes, num_windows: int) -> None:
        transport, far = exchange.transport, exchange.reach.far
        ranks, me, nbytes = range(transport.num_ranks), exchange.rank, sizes.window_bytes
        self._region = transport.allocate_on(exchange.device, num_windows * len(ranks) * nbytes)
        self._transport = transport
        self._num_ranks = len(ranks)
        self._window_bytes = nbytes
        bases = [transport.peer(self._region, rank) or 0 for rank in ranks]
        self.num_windows = num_windows
        self.outgoing = [[base + self._offset(window, me) for base in bases] for window in range(num_windows)]
        self.incoming = [
            [bases[me] + self._offset(window, source) for source in ranks] for window in range(num_windows)
        ]
        self.kept: list[Any] = [None] * num_windows
        if far:
            self._outbox = _C.Mapping.create_private(len(far) * nbytes)
            for window in self.outgoing:
                for place, rank in enumerate(far):
                    window[rank] = self._outbox.address + place * nbytes
        self.landing_bytes = sizes.landing_bytes
        self.landings: Region | None = None
        if not exchange.reach.is_complete:
            self.landings = transport.allocate(num_windows * self.landing_bytes)

    def _offset(self, window: int, source: int) -> int:
        return (window * self._num_ranks + source) * self._window_bytes

    def send_far(self, window: int, rank: int, nbytes: int) -> None:
        """Sends what is written for a far rank to my window there."""
        offset = self._offset(window, self._transport.rank)
        self._transport.put(self._region, offset, self.outgoing[window][rank], nbytes, rank)


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
