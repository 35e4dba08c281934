"""Small messages between the ranks: what each is about to do, where its peers may write, and why it gave up.

The control region of a rank, written by its peers (S slots, so that a message outlives the calls in flight):

    cards    [S][R]     call number, operation, signature, offsets, limits; then counts [E + R] and crossings int32
    grants   [S][R]     call number, offset, bytes needed, bytes allowed, refused, offset of the passage
    notices  [32][R]    call number, kind, length, text: why the source gave up on the call
    marks    [R][1024]  call number: that the source gave up on the call

A rank that refuses one call after the other runs ahead of peers that still finish an earlier one. So a notice may be
overwritten before it is read; the mark says whether it concerned the call, and lasts longer.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from moecomm import _C
from moecomm.transports.base import Region, Transport

__all__ = ["CARD_HEAD_BYTES", "MAX_PLANES", "Card", "Grant", "Mailbox", "Notice", "Parcel"]

MAX_PLANES = 4
_LINE = 64

# Call number, operation, 9 words of signature; offsets of the planes, need, limit, refused, recording.
_CARD = struct.Struct("11q4q4q")
# Words that must agree, where refused and recording are, and the first of the offsets.
_CARD_WORDS = (11, 17, 18, 11)
_RECORDED = 2
_NOWHERE = (-1,) * MAX_PLANES
_GRANT = struct.Struct("6q")
# Call number + 1, kind, length of the text, ranks that are blamed, text.
_NOTICE = struct.Struct("3q8i1000s")
_NUM_BLAMED = 8
_NOTICE_TEXT_BYTES = 1000
_NUM_NOTICES = 32
_NUM_MARKS = 1024


CARD_HEAD_BYTES = -(-_CARD.size // _LINE) * _LINE
"""What a card without counts takes in front of a message."""


class Parcel(NamedTuple):
    """A message on its way to a rank that has no address here; the card of the call goes in front.

    Attributes:
        rank: to whom.
        region, offset: where it belongs there.
        address: where it lies here; begins with `CARD_HEAD_BYTES` of room.
        nbytes: of everything.
    """

    rank: int
    region: Region
    offset: int
    address: int
    nbytes: int


class Card(NamedTuple):
    """What a rank says when it begins a call.

    Attributes:
        sequence: number of the call.
        operation: code of the operation.
        words: 9 integers that must agree on all ranks.
        offsets: where its planes lie in the arena (up to 4).
        need: bytes of receive memory it needs; 0 = none.
        limit: bytes it may have alive.
        refused: the memory was not there.
        recording: autograd records the call there.
    """

    sequence: int
    operation: int
    words: tuple[int, ...]
    offsets: tuple[int, ...]
    need: int
    limit: int
    refused: bool
    recording: bool


class Grant(NamedTuple):
    """Receive memory that a rank has set aside: block at `offset` of its arena, or refused with the numbers.

    A rail grants another block for what passes through, at `passage`; see `passage.py`.
    """

    offset: int
    need: int
    limit: int
    refused: bool
    passage: int = 0


class Notice(NamedTuple):
    """That a rank gave up on a call.

    Attributes:
        rank: which.
        kind: a small number whose meaning the sender and the reader agree on.
        text: why.
        blamed: the first of the ranks on whose account it gave up; empty: on its own.
    """

    rank: int
    kind: int
    text: str
    blamed: tuple[int, ...] = ()


class Mailbox:
    """Cards, grants and notices of one communicator. Construction is collective.

    Arguments:
        transport: carries the messages.
        num_counts: E + R.
        num_slots: calls whose messages are kept; at least the number of calls in flight.
        num_crossings: room for further counts, two by domain.

    Attributes:
        num_slots: as given.
        counts_out: `[E + R]` int32: the counts that the next `send_card(..., with_counts=True)` sends.
        crossings_out: `[num_crossings]` int32, sent with them.
    """

    def __init__(self, transport: Transport, num_counts: int, num_slots: int, num_crossings: int = 0) -> None:
        self._transport = transport
        self.num_slots = num_slots
        self._num_ranks = transport.num_ranks
        self._ranks = range(transport.num_ranks)
        self._behind_me = [(transport.rank + step) % self._num_ranks for step in range(1, self._num_ranks + 1)]
        counts_start = _lines(_CARD.size)
        num_words = num_counts + num_crossings
        self._sizes = (counts_start + _lines(4 * num_words), _lines(_GRANT.size), _lines(_NOTICE.size))
        self._slots = (num_slots, num_slots, _NUM_NOTICES)
        sections = [slots * transport.num_ranks * size for slots, size in zip(self._slots, self._sizes, strict=True)]
        self._starts = (0, sections[0], sections[0] + sections[1])
        self._marks_start = sum(sections)
        self._region = transport.allocate(self._marks_start + transport.num_ranks * _NUM_MARKS * 8)
        self._view = transport.mapping(self._region).view(0, self._region.nbytes)
        self._my_cards = [self._offset(0, slot, transport.rank) for slot in range(num_slots)]
        self._card_addresses = [self._region.address + self._offset(0, slot, 0) for slot in range(num_slots)]
        cards = np.frombuffer(self._view[: sections[0]], dtype=np.uint8)
        cards = cards.reshape(num_slots, transport.num_ranks, self._sizes[0])
        words = cards[:, :, counts_start:].view(np.int32)
        self._counts, self._crossings = words[:, :, :num_counts], words[:, :, num_counts:num_words]
        marks = np.frombuffer(self._view[self._marks_start :], dtype=np.int64)
        self._marks = marks.reshape(transport.num_ranks, _NUM_MARKS)
        self._mark_out = np.zeros(1, dtype=np.int64)
        self._outgoing = [bytearray(size) for size in self._sizes]
        self._out_addresses = [np.frombuffer(out, dtype=np.uint8).ctypes.data for out in self._outgoing]
        words_out = torch.frombuffer(self._outgoing[0], dtype=torch.int32, count=num_words, offset=counts_start)
        self.counts_out, self.crossings_out = words_out[:num_counts], words_out[num_counts:]
        self._carried: list[tuple[list[int], list[int]]] = []

    def carry_cards(self, sources: Sequence[int], heads: Sequence[Sequence[int]]) -> None:
        """Says that cards of some ranks may come in front of messages, from which they are then filed.

        Arguments:
            sources: which ranks.
            heads: address of the card in front of each source's message, by slot and rank; a slot per slot of cards.
        """
        if sources:
            assert len(heads) == self.num_slots
            self._carried = [
                ([at[s] for s in sources], [self._region.address + self._offset(0, slot, s) for s in sources])
                for slot, at in enumerate(heads)
            ]

    def _file(self, sequence: int) -> None:
        """Puts cards of a call that came in front of messages where all others are."""
        _C.file_cards(*self._carried[sequence % self.num_slots], _CARD.size, sequence)

    def _offset(self, kind: int, sequence: int, source: int) -> int:
        slot = sequence % self._slots[kind]
        return self._starts[kind] + (slot * self._num_ranks + source) * self._sizes[kind]

    def _post(self, kind: int, sequence: int, nbytes: int, lane: int, advance: int) -> None:
        offset = self._offset(kind, sequence, self._transport.rank)
        self._transport.post(self._region, offset, self._out_addresses[kind], nbytes, lane, advance)

    def send_card(
        self,
        words: tuple[int, ...],
        offsets: tuple[int, ...],
        rest: tuple[int, int, bool, bool],
        lane: int,
        advance: int,
        with_counts: bool,
        parcels: Sequence[Parcel] = (),
    ) -> None:
        """Sends a card to every rank and adds `advance` to its counter `lane`.

        Arguments:
            words: number of the call, operation, and what must agree.
            offsets, rest: see `Card`; `rest` is what follows the offsets there.
            parcels: messages that carry the card to their ranks; without counts.
        """
        _CARD.pack_into(self._outgoing[0], 0, *words, *offsets, *_NOWHERE[len(offsets) :], *rest)
        nbytes = self._sizes[0] if with_counts else _CARD.size
        start = self._my_cards[words[0] % self.num_slots]
        others = None
        if parcels:
            for rank, region, offset, address, size in parcels:
                ctypes.memmove(address, self._out_addresses[0], nbytes)
                self._transport.post(region, offset, address, size, lane, advance, (rank,))
            reached = [parcel.rank for parcel in parcels]
            others = [rank for rank in self._behind_me if rank not in reached]
        self._transport.post(self._region, start, self._out_addresses[0], nbytes, lane, advance, others)

    def agreed(self, sequence: int, num_planes: int, bases: Sequence[int]) -> tuple[list[list[int]], bool] | None:
        """Everybody's offsets, by plane and rank, and whether anybody records the call. `bases`, by rank, are added.

        None unless all cards show the same call and nobody refused; then `cards` says more.
        """
        if self._carried:
            self._file(sequence)
        address = self._card_addresses[sequence % self.num_slots]
        state, offsets = _C.read_cards(address, self._sizes[0], self._num_ranks, *_CARD_WORDS, num_planes, bases)
        return (offsets, state == _RECORDED) if state else None

    def cards(self, sequence: int) -> list[Card]:
        """Everybody's cards for this call, by rank, once the counters say that they are there."""
        if self._carried:
            self._file(sequence)
        cards = []
        start = self._offset(0, sequence, 0)
        for source in self._ranks:
            words = _CARD.unpack_from(self._view, start + source * self._sizes[0])
            flags = (bool(words[17]), bool(words[18]))
            cards.append(Card(words[0], words[1], words[2:11], words[11:15], words[15], words[16], *flags))
        return cards

    def counts(self, sequence: int) -> npt.NDArray[np.int32]:
        """`[R, E + R]` int32: a copy of the counts on everybody's cards."""
        counts: npt.NDArray[np.int32] = self._counts[sequence % self.num_slots].copy()
        return counts

    def crossings(self, sequence: int, num_domains: int) -> torch.Tensor:
        """`[R, 2, D]` int32: a copy of the further counts on everybody's cards."""
        found = self._crossings[sequence % self.num_slots, :, : 2 * num_domains]
        return torch.from_numpy(found.copy()).view(-1, 2, num_domains)

    def send_grant(self, sequence: int, grant: Grant, lane: int, advance: int) -> None:
        """Sends a grant to every rank and adds `advance` to its counter `lane`."""
        _GRANT.pack_into(self._outgoing[1], 0, sequence, *grant)
        self._post(1, sequence, _GRANT.size, lane, advance)

    def grants(self, sequence: int) -> list[Grant]:
        """Everybody's grants for this call, by rank."""
        grants = []
        for source in self._ranks:
            _, offset, need, limit, refused, passage = _GRANT.unpack_from(self._view, self._offset(1, sequence, source))
            grants.append(Grant(offset, need, limit, bool(refused), passage))
        return grants

    def send_notice(self, sequence: int, kind: int, text: str, lane: int, blamed: Sequence[int] = ()) -> None:
        """Tells every rank that this one gave up on the call (see `Notice`), and adds 1 to its counter `lane`."""
        data = text.encode()[:_NOTICE_TEXT_BYTES]
        ranks = [*blamed, *[-1] * _NUM_BLAMED][:_NUM_BLAMED]
        # Call numbers are stored with + 1, so that untouched memory is no notice.
        _NOTICE.pack_into(self._outgoing[2], 0, sequence + 1, kind, len(data), *ranks, data)
        offset = self._offset(2, sequence, self._transport.rank)
        for rank in self._ranks:
            self._transport.put(self._region, offset, self._out_addresses[2], _NOTICE.size, rank)
        self._mark_out[0] = sequence + 1
        mark = self._marks_start + 8 * (self._transport.rank * _NUM_MARKS + sequence % _NUM_MARKS)
        self._transport.post(self._region, mark, self._mark_out.ctypes.data, 8, lane, 1)

    def notices(self, sequence: int) -> list[Notice]:
        """By rank, who gave up on this call (or on one so much later that this call's mark is overwritten), and why."""
        found = []
        for source in np.flatnonzero(self._marks[:, sequence % _NUM_MARKS] > sequence).tolist():
            number, kind, length, *ranks, text = _NOTICE.unpack_from(self._view, self._offset(2, sequence, source))
            if number == sequence + 1:
                blamed = tuple(rank for rank in ranks if rank >= 0)
                found.append(Notice(source, kind, text[:length].decode(errors="replace"), blamed))
            elif number > sequence:  # else the mark has overtaken its notice, which is there with the signal
                found.append(Notice(source, 0, "its reason was overwritten by that of a later call"))
        return found


def _lines(nbytes: int) -> int:
    """Rounded up to whole cache lines, so that sources do not disturb each other."""
    return -(-nbytes // _LINE) * _LINE
