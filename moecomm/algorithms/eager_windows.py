"""Where low-latency messages arrive, and what the calls of that mode share."""

from __future__ import annotations

from typing import Any, NamedTuple

from moecomm import _C
from moecomm.algorithms.eager_sizes import EagerSizes
from moecomm.algorithms.exchange import Exchange
from moecomm.algorithms.mailbox import CARD_HEAD_BYTES, Parcel
from moecomm.algorithms.message_holders import MessageHolders
from moecomm.kernels.eager import EagerKernels, Home
from moecomm.transports.base import Region

__all__ = ["EagerTools", "Windows"]


class Windows:
    """Where messages arrive. Construction is collective.

    A window has room for a message of each source, and for the card of the call in front of it: a message that is sent
    brings the card along.

    Arguments:
        exchange: what calls share.
        sizes: the fixed shapes.
        num_windows: calls whose messages are kept.
        holders: who holds which messages.

    Attributes:
        num_windows: as given; call n uses window n modulo that.
        outgoing: per window the addresses of my messages at their holders; for those that have no address here, where
            what they are to get is written first.
        incoming: per window the addresses of the sources' messages to me, by rank, whoever holds them.
        slots: the same of those that I hold.
        room: bytes of a message at most.
        kept: per window what peers may still read of the call that used it last.
        landings: where rows from far ranks land in combines; None where nobody is far from anybody.
    """

    def __init__(self, exchange: Exchange, sizes: EagerSizes, num_windows: int, holders: MessageHolders) -> None:
        transport, far = exchange.transport, exchange.reach.far
        ranks, me, nbytes = range(transport.num_ranks), exchange.rank, sizes.window_bytes
        self._region = transport.allocate_on(exchange.device, num_windows * len(ranks) * nbytes)
        self._rank = me
        self._num_ranks = len(ranks)
        self._window_bytes = nbytes
        self.room = nbytes - CARD_HEAD_BYTES
        bases = [transport.peer(self._region, rank) or 0 for rank in ranks]
        self.num_windows = num_windows

        def messages(window: int, source: int) -> int:
            return self._offset(window, source) + CARD_HEAD_BYTES

        self.outgoing = [
            [bases[one] + messages(window, me) for one in holders.holders] for window in range(num_windows)
        ]
        self.incoming = [
            [bases[one] + messages(window, source) for source, one in enumerate(holders.sources)]
            for window in range(num_windows)
        ]
        self.slots = [[bases[me] + messages(window, source) for source in ranks] for window in range(num_windows)]
        self.kept: list[Any] = [None] * num_windows
        self._outboxes: dict[int, int] = {}
        if far:
            self._outbox = _C.Mapping.create_private(len(far) * nbytes)
            self._outboxes = {rank: self._outbox.address + i * nbytes + CARD_HEAD_BYTES for i, rank in enumerate(far)}
            for window in self.outgoing:
                window[:] = [self._outboxes.get(one, there) for one, there in zip(holders.holders, window, strict=True)]
        heads = [[message - CARD_HEAD_BYTES for message in window] for window in self.slots]
        exchange.mailbox.carry_cards(sorted(far), heads)
        self.landing_bytes = sizes.landing_bytes
        self.landings: Region | None = None
        if not exchange.reach.is_complete:
            self.landings = transport.allocate(num_windows * self.landing_bytes)

    def _offset(self, window: int, source: int) -> int:
        return (window * self._num_ranks + source) * self._window_bytes

    def outbox(self, rank: int) -> int:
        """Where messages to a far rank are written first."""
        return self._outboxes[rank]

    def parcel(self, window: int, rank: int, nbytes: int) -> Parcel:
        """What carries a message of so many bytes from the outbox to my window at a far rank."""
        address = self._outboxes[rank] - CARD_HEAD_BYTES
        return Parcel(rank, self._region, self._offset(window, self._rank), address, CARD_HEAD_BYTES + nbytes)


class EagerTools(NamedTuple):
    """What low-latency calls share.

    Attributes:
        exchange: what all calls share.
        windows: where messages arrive.
        sizes: the fixed shapes.
        kernels: send, sort what arrives, copy.
        home: who receives.
        holders: who holds which messages.
    """

    exchange: Exchange
    windows: Windows
    sizes: EagerSizes
    kernels: EagerKernels
    home: Home
    holders: MessageHolders
