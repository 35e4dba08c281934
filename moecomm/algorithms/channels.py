"""Channels between domains: from each rank to the ranks of other domains that serve it, its rails.

A channel is a ring of chunks in the rail's memory. Its source may have as many chunks there as the ring holds; as the
rail takes them out it gives the source credit for others. So memory is bounded, whatever goes through.

A chunk says which call it belongs to. Where a call has failed, chunks of it may be left in the ring: they are taken out
unread during the next call, and the channel is in step again.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from moecomm import _C
from moecomm.algorithms.calls import LANE_CHUNK, LANE_CREDIT
from moecomm.algorithms.plan import block_layout
from moecomm.topology import Topology
from moecomm.transports.base import Transport

__all__ = ["HEADER_BYTES", "Channels", "Chunk", "ChunkForm"]

HEADER_BYTES = 64
# Small, so that little time passes before the first one is on its way and after the last one has come.
_LARGEST_CHUNK = 256 << 10
# Credit may have to queue behind rows that travel the other way, and the link should stay busy meanwhile.
_FEWEST_PLACES, _MOST_PLACES = 4, 32
# The part of a ring for which credit is given at once, to send fewer messages; the end of a call gives it for all.
_CREDIT_PARTS = 8
# What all rings of a rank take together, unless single rows are larger than their share.
_RING_BYTES = 32 << 20

# Call number, rows, whether it is the last of its call, where answers belong.
_HEADER = struct.Struct("5q")


class Chunk(NamedTuple):
    """What has arrived.

    Attributes:
        address: of the first array, behind the header.
        num_rows: n.
        is_last: none of this call follows in the channel.
        answers: where the rail's answers belong in the source's receive memory, two offsets.
    """

    address: int
    num_rows: int
    is_last: bool
    answers: tuple[int, int]


class ChunkForm:
    """The arrays of the chunks of one call, n entries each, one array behind the other.

    Arguments:
        chunk_bytes: that a chunk may take.
        entry_bytes: of one entry of each array.
        most_rows: a further limit on n.

    Attributes:
        most_rows: the largest n, at least 1.
    """

    def __init__(self, chunk_bytes: int, entry_bytes: Sequence[int], most_rows: int = 2**31) -> None:
        self._entry_bytes = tuple(entry_bytes)
        room = chunk_bytes - HEADER_BYTES * (1 + len(self._entry_bytes))
        self.most_rows = max(1, min(most_rows, room // sum(self._entry_bytes)))
        assert HEADER_BYTES + self.nbytes(self.most_rows) <= chunk_bytes

    def nbytes(self, num_rows: int) -> int:
        """Bytes of the arrays."""
        return block_layout(num_rows, self._entry_bytes).nbytes

    def addresses(self, start: int, num_rows: int) -> list[int]:
        """Where each array begins if the first begins at `start`."""
        return [start + offset for offset in block_layout(num_rows, self._entry_bytes).offsets]


class Channels:
    """The channels of one rank: those that begin here and those that end here. Construction is collective.

    Arguments:
        transport: carries the chunks.
        topology: who serves whom.
        entry_bytes: the most that one entry of a chunk takes, over all its arrays.

    Attributes:
        topology: as given.
        rails: who serves me in each other domain, by domain; the domains behind mine first, so that the ranks spread
            over different receivers.
        sources: whom I serve, ascending.
        chunk_bytes: that a chunk may take, header included.
        outbox: address of the arrays of the next chunk that is sent.
    """

    def __init__(self, transport: Transport, topology: Topology, entry_bytes: int) -> None:
        self._transport = transport
        self.topology = topology
        me, domain, num = transport.rank, topology.domain_of[transport.rank], topology.num_domains
        others = [(domain + step) % num for step in range(1, num)]
        self.rails = {other: topology.rail(me, other) for other in others}
        self.sources = topology.rail_sources(me)
        most_sources = max(1, *(len(topology.rail_sources(rank)) for rank in range(topology.num_ranks)))
        share = min(_LARGEST_CHUNK, _RING_BYTES // (_FEWEST_PLACES * most_sources))
        least = entry_bytes + 8 * HEADER_BYTES
        self.chunk_bytes = max(share // HEADER_BYTES, -(-least // HEADER_BYTES)) * HEADER_BYTES
        places = _RING_BYTES // (self.chunk_bytes * most_sources)
        self._num_places = max(_FEWEST_PLACES, min(places, _MOST_PLACES))
        self._region = transport.allocate(most_sources * self._num_places * self.chunk_bytes)
        self._memory = transport.mapping(self._region).view(0, self._region.nbytes)
        self._outbox = _C.Mapping.create_private(self.chunk_bytes)
        self._header_out = self._outbox.view(0, HEADER_BYTES)
        self.outbox = self._outbox.address + HEADER_BYTES
        ring = self._num_places * self.chunk_bytes
        self._rings_here = {source: place * ring for place, source in enumerate(self.sources)}
        self._rings_there = {rail: topology.rail_sources(rail).index(me) * ring for rail in self.rails.values()}
        self._num_sent = dict.fromkeys(self._rings_there, 0)
        self._num_taken = dict.fromkeys(self._rings_here, 0)
        self._num_credited = dict.fromkeys(self._rings_here, 0)
        self._last_sent = 0

    def may_send(self, rail: int) -> bool:
        """Whether there is a place in the ring."""
        return self.num_unanswered(rail) < self._num_places

    def num_unanswered(self, rail: int) -> int:
        """Chunks sent to the rail for which it has given no credit; none once it has taken out a call's last one."""
        return self._num_sent[rail] - self._transport.lane(LANE_CREDIT, rail)

    def send(self, rail: int, sequence: int, chunk: Chunk, nbytes: int) -> None:
        """Sends what stands in the outbox, for which there must be a place; calls send in order of their numbers.

        Arguments:
            rail: to whom.
            sequence: number of the call.
            chunk: what it is; its address does not matter.
            nbytes: of the arrays.
        """
        assert sequence >= self._last_sent, f"call #{sequence} sends after #{self._last_sent}"
        self._last_sent = sequence
        _HEADER.pack_into(self._header_out, 0, sequence, chunk.num_rows, chunk.is_last, *chunk.answers)
        offset = self._rings_there[rail] + self._num_sent[rail] % self._num_places * self.chunk_bytes
        size = HEADER_BYTES + nbytes
        self._transport.post(self._region, offset, self._outbox.address, size, LANE_CHUNK, 1, (rail,))
        self._num_sent[rail] += 1

    def next_chunk(self, source: int, sequence: int) -> Chunk | None:
        """The next chunk of the call from a rank that I serve, or None if it is not here yet."""
        while self._num_taken[source] < self._transport.lane(LANE_CHUNK, source):
            offset = self._rings_here[source] + self._num_taken[source] % self._num_places * self.chunk_bytes
            number, num_rows, is_last, *answers = _HEADER.unpack_from(self._memory, offset)
            if number == sequence:
                address = self._region.address + offset + HEADER_BYTES
                return Chunk(address, num_rows, bool(is_last), (answers[0], answers[1]))
            if number > sequence:  # the source gave up on the call, and has said so elsewhere
                return None
            self.take(source, is_last=bool(is_last))
        return None

    def take(self, source: int, *, is_last: bool) -> None:
        """Takes the next chunk out: its place may be written to, and what came of it is where it belongs."""
        self._num_taken[source] += 1
        owed = self._num_taken[source] - self._num_credited[source]
        if is_last or owed * _CREDIT_PARTS >= self._num_places:
            self._transport.signal(source, LANE_CREDIT, owed)
            self._num_credited[source] += owed
