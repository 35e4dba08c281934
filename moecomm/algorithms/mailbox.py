"""Small messages between the ranks: what each is about to do, where its peers may write, and why it gave up.

The control region of a rank, written by its peers (S slots, so that a message outlives the calls in flight):

    cards    [S][R]  call number, operation, signature, offsets, limits; then counts [E + R] int32
    grants   [S][R]  call number, offset, bytes needed, bytes allowed
    notices  [S][R]  call number, length, text: why the source gave up on the call
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from moecomm.transports.base import Transport

__all__ = ["MAX_PLANES", "Card", "Grant", "Mailbox"]

MAX_PLANES = 4
_SIGNATURE_WORDS = 8
_CARD_WORDS = 24
_GRANT_WORDS = 8
_NOTICE_WORDS = 128
_NOTICE_TEXT_BYTES = (_NOTICE_WORDS - 2) * 8


@dataclasses.dataclass(frozen=True)
class Card:
    """What a rank says when it begins a call.

    Attributes:
        sequence: number of the call.
        operation: code of the operation.
        signature: 8 integers that must agree on all ranks.
        offsets: where its planes lie in the arena; -1 = nowhere.
        need: bytes of receive memory it needs; 0 = none.
        limit: bytes it may have alive; `refused` says whether `need` fits.
        refused: the memory was not there.
    """

    sequence: int
    operation: int
    signature: tuple[int, ...]
    offsets: tuple[int, ...] = ()
    need: int = 0
    limit: int = 0
    refused: bool = False


@dataclasses.dataclass(frozen=True)
class Grant:
    """Receive memory that a rank has set aside: block at `offset` of its arena, or refused with the numbers."""

    offset: int
    need: int
    limit: int
    refused: bool


class Mailbox:
    """Cards, grants and notices of one communicator. Construction is collective.

    Arguments:
        transport: carries the messages.
        num_counts: E + R.
        num_slots: calls whose messages are kept; at least the number of calls in flight.
    """

    def __init__(self, transport: Transport, num_counts: int, num_slots: int) -> None:
        self._transport = transport
        self.num_slots = num_slots
        ranks = transport.num_ranks
        count_words = -(-num_counts // 16) * 8  # int32 counts, in whole cache lines
        sizes = (_CARD_WORDS + count_words, _GRANT_WORDS, _NOTICE_WORDS)
        self._starts = np.cumsum([0] + [num_slots * ranks * words for words in sizes]).tolist()
        self._sizes = sizes
        self._region = transport.allocate(self._starts[-1] * 8)
        words = np.frombuffer(transport.mapping(self._region).view(0, self._region.nbytes), dtype=np.int64)
        views = [
            words[start : start + num_slots * ranks * size].reshape(num_slots, ranks, size)
            for start, size in zip(self._starts[:-1], sizes, strict=True)
        ]
        self._cards, self._grants, self._notices = views
        self._counts = self._cards[:, :, _CARD_WORDS:].view(np.int32)[:, :, :num_counts]
        self._outgoing = [np.zeros(size, dtype=np.int64) for size in sizes]
        self._card_bytes = _CARD_WORDS * 8
        self.counts_out: npt.NDArray[np.int32] = self._outgoing[0][_CARD_WORDS:].view(np.int32)[:num_counts]
        """`[E + R]` int32: the counts that the next `send_card(..., with_counts=True)` sends."""

    def _offset(self, kind: int, sequence: int) -> int:
        row = (sequence % self.num_slots) * self._transport.num_ranks + self._transport.rank
        return int(self._starts[kind] + row * self._sizes[kind]) * 8

    def _post(self, kind: int, sequence: int, nbytes: int, lane: int, advance: int) -> None:
        address = self._outgoing[kind].ctypes.data
        self._transport.post(self._region, self._offset(kind, sequence), address, nbytes, lane, advance)

    def send_card(self, card: Card, lane: int, advance: int, *, with_counts: bool) -> None:
        """Sends a card to every rank and adds `advance` to its counter `lane`."""
        planes = card.offsets + (-1,) * (MAX_PLANES - len(card.offsets))
        words = (card.sequence, card.operation, *card.signature, *planes, card.need, card.limit, int(card.refused))
        self._outgoing[0][: len(words)] = words
        nbytes = self._outgoing[0].nbytes if with_counts else self._card_bytes
        self._post(0, card.sequence, nbytes, lane, advance)

    def card(self, sequence: int, source: int) -> Card:
        """The card of `source` for this call, once its counter says that it is there."""
        words = self._cards[sequence % self.num_slots, source, :_CARD_WORDS].tolist()
        planes = 2 + _SIGNATURE_WORDS
        return Card(
            sequence=words[0],
            operation=words[1],
            signature=tuple(words[2:planes]),
            offsets=tuple(words[planes : planes + MAX_PLANES]),
            need=words[planes + MAX_PLANES],
            limit=words[planes + MAX_PLANES + 1],
            refused=bool(words[planes + MAX_PLANES + 2]),
        )

    def counts(self, sequence: int) -> npt.NDArray[np.int32]:
        """`[R, E + R]` int32: a copy of the counts on everybody's cards."""
        counts: npt.NDArray[np.int32] = self._counts[sequence % self.num_slots].copy()
        return counts

    def send_grant(self, sequence: int, grant: Grant, lane: int, advance: int) -> None:
        """Sends a grant to every rank and adds `advance` to its counter `lane`."""
        self._outgoing[1][:5] = (sequence, grant.offset, grant.need, grant.limit, int(grant.refused))
        self._post(1, sequence, self._outgoing[1].nbytes, lane, advance)

    def grants(self, sequence: int) -> list[Grant]:
        """Everybody's grants for this call, by rank."""
        rows = self._grants[sequence % self.num_slots].tolist()
        return [Grant(offset=row[1], need=row[2], limit=row[3], refused=bool(row[4])) for row in rows]

    def send_notice(self, sequence: int, text: str, lane: int, advance: int) -> None:
        """Tells every rank that this one gave up on the call, and adds `advance` to its counter `lane`."""
        data = text.encode()[:_NOTICE_TEXT_BYTES]
        out = self._outgoing[2]
        # The call number is stored with + 1, so that untouched memory is no notice.
        out[:2] = (sequence + 1, len(data))
        out[2:].view(np.uint8)[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        self._post(2, sequence, out.nbytes, lane, advance)

    def notices(self, sequence: int) -> list[tuple[int, str]]:
        """Ranks that gave up on this call (or already on one so much later that this call's notice is overwritten)."""
        rows = self._notices[sequence % self.num_slots]
        found = np.flatnonzero(rows[:, 0] > sequence).tolist()
        texts = [
            rows[rank, 2:].view(np.uint8)[: int(rows[rank, 1])].tobytes().decode(errors="replace") for rank in found
        ]
        return list(zip(found, texts, strict=True))
