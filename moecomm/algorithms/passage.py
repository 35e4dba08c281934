"""What crosses between domains in one call of devices: packed by those who send it, in parts, one for each receiver.

What a rank sends over its rails goes to one rank in each other domain, and what it answers as a rail to each rank that
it serves. Either way a part is some arrays of n entries, one behind the other. Parts are packed in receive memory of
the sender's own and put to receive memory that the receiver has set aside:

    leaving, at the sender     part for the first receiver | for the second | ...  (none for those with an address here)
    arriving, at the receiver  part of the first sender    | of the second  | ...

They are put at once, or in pieces, so that what has arrived is passed on while the rest is under way: a rank's parts,
those for the domains next to its own first, in equal shares. Then a piece comes to a rail from few domains:

    4 domains      part for the next | for the second next | for the third
    pieces         0           | 1           | 2           | 3

All ranks know how many tokens of whom have experts in which domain, so all of them know where each part begins.

    R ranks   D domains   n entries of a part: tokens of one rank that have an expert in one domain, in their order
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from moecomm.algorithms.calls import PIECES
from moecomm.algorithms.plan import block_layout
from moecomm.kernels.far_runs import FarRun
from moecomm.topology import Topology

__all__ = ["Part", "Passage", "pieces_of", "to_homes", "to_rails"]

# Bytes; less crosses in one piece, for each piece costs a launch and a round trip.
_LEAST_CUT = 1 << 23
# So the arrays of a piece begin where 16 bytes do, as those of a whole part, and kernels are the same.
_ROWS_TOGETHER = 16
Senders = Callable[[int], list[tuple[int, int]]]
"""Who sends to a rank, in the order in which it lies there, and how many entries."""


class Part(NamedTuple):
    """What goes from one rank to another.

    Attributes:
        sender, receiver: the ranks.
        num_rows: n.
        offset: where it begins in what arrives at the receiver.
        packed: where it begins in what leaves the sender; -1: the sender writes it to the receiver's memory.
        step: how many domains lie between the sender's and the receiver's, counted on from the sender's.
    """

    sender: int
    receiver: int
    num_rows: int
    offset: int
    packed: int
    step: int

    def share(self, piece: int, num_pieces: int, num_domains: int) -> range:
        """Which of its entries are in a piece, of what goes to other domains."""
        start, end = ((piece + one) * (num_domains - 1) - self.step * num_pieces for one in (0, 1))
        return range(self._cut(start, num_pieces), self._cut(end, num_pieces))

    def _cut(self, at: int, num_pieces: int) -> int:
        if at >= num_pieces:
            return self.num_rows
        return self.num_rows * max(at, 0) // num_pieces // _ROWS_TOGETHER * _ROWS_TOGETHER


class Passage:
    """The parts of one call that one rank sends or receives.

    Arguments:
        topology: who is where.
        rank: mine.
        far: ranks whose memory has no address here.
        receivers: to whom I send.
        senders: who sends to whom.
        array_bytes: of one entry of each array.

    Attributes:
        leaving: my parts, by receiver as given.
        arriving: the parts that come to me.
        leaving_bytes, arriving_bytes: memory that they take here.
    """

    def __init__(
        self,
        topology: Topology,
        rank: int,
        far: Sequence[int],
        receivers: Sequence[int],
        senders: Senders,
        array_bytes: tuple[int, ...],
    ) -> None:
        self._topology = topology
        self._array_bytes = array_bytes
        self.leaving: list[Part] = []
        self.leaving_bytes = 0
        for receiver in receivers:
            part = next(part for part in self._parts_at(receiver, senders) if part.sender == rank)
            if receiver in far:
                part = part._replace(packed=self.leaving_bytes)
                self.leaving_bytes += self._bytes_of(part)
            self.leaving.append(part)
        self.arriving = self._parts_at(rank, senders)
        self.arriving_bytes = sum(map(self._bytes_of, self.arriving))

    def _bytes_of(self, part: Part) -> int:
        return block_layout(part.num_rows, self._array_bytes).nbytes

    def _parts_at(self, receiver: int, senders: Senders) -> list[Part]:
        parts, offset, domain_of = [], 0, self._topology.domain_of
        for sender, num_rows in senders(receiver):
            step = (domain_of[receiver] - domain_of[sender] - 1) % self._topology.num_domains
            parts.append(Part(sender, receiver, num_rows, offset, -1, step))
            offset += self._bytes_of(parts[-1])
        return parts

    def sent_arrays(self, part: Part, leaving: int, blocks: Sequence[int]) -> list[int]:
        """Where I write the arrays of a part.

        Arguments:
            part: one of `leaving`.
            leaving: address of what leaves.
            blocks: by rank, the address here of what arrives there.
        """
        is_packed = part.packed >= 0
        return self._arrays(part, leaving + part.packed if is_packed else blocks[part.receiver] + part.offset)

    def received_arrays(self, part: Part, arriving: int) -> list[int]:
        """Where the arrays of a part lie, one of `arriving`, given the address of what arrives."""
        return self._arrays(part, arriving + part.offset)

    def _arrays(self, part: Part, start: int) -> list[int]:
        return [start + offset for offset in block_layout(part.num_rows, self._array_bytes).offsets]

    def runs(self, offsets: Sequence[int]) -> list[FarRun]:
        """What is put, counted from where what leaves begins.

        Arguments:
            offsets: by rank, the offset in its receive memory of what arrives there.
        """
        return [
            FarRun(part.receiver, offsets[part.receiver] + part.offset, part.packed, self._bytes_of(part))
            for part in self._put_parts()
        ]

    def _put_parts(self) -> list[Part]:
        return [part for part in self.leaving if part.packed >= 0 and part.num_rows]

    def piece(self, piece: int, num_pieces: int, offsets: Sequence[int], num_planes: int) -> list[FarRun]:
        """What of that is put with a piece.

        Arguments:
            piece, num_pieces: which, of how many.
            offsets: as there.
            num_planes: arrays of which a piece has a share; the others go with the first of a part.
        """
        found = []
        for whole, part in zip(self.runs(offsets), self._put_parts(), strict=True):
            share = part.share(piece, num_pieces, self._topology.num_domains)
            starts = block_layout(part.num_rows, self._array_bytes).offsets
            spans = [
                (start + share.start * nbytes, len(share) * nbytes)
                for start, nbytes in zip(starts[:num_planes], self._array_bytes, strict=False)
            ]
            if share and share.start == 0 and num_planes < len(starts):
                spans.append((starts[num_planes], whole.nbytes - starts[num_planes]))
            found += [FarRun(whole.rank, whole.target + at, whole.source + at, size) for at, size in spans if size]
        return found

    def shares(self, parts: Sequence[Part], piece: int, num_pieces: int) -> list[tuple[Part, range]]:
        """Which entries of parts, of those that leave or arrive, are in a piece."""
        shares = [(part, part.share(piece, num_pieces, self._topology.num_domains)) for part in parts]
        return [(part, share) for part, share in shares if share]


def pieces_of(nbytes: int) -> int:
    """In how many pieces so much is put, or passed on."""
    return PIECES if nbytes >= _LEAST_CUT else 1


def to_rails(
    topology: Topology,
    rank: int,
    far: Sequence[int],
    crossings: torch.Tensor,
    array_bytes: tuple[int, ...],
    *,
    with_own: bool = False,
) -> Passage:
    """What goes from each rank to its rails, to the domains behind its own first, so that ranks spread over receivers.

    Arguments:
        topology: who is where.
        rank, far, array_bytes: as for `Passage`.
        crossings: `[R, D]` int32 on the host: tokens of each rank that have an expert in each domain.
        with_own: a rank also sends to itself, as its rail in its own domain.
    """
    numbers, domain, num = crossings.tolist(), topology.domain_of[rank], topology.num_domains
    rails = [topology.rail(rank, (domain + step) % num) for step in range(0 if with_own else 1, num)]

    def senders(rail: int) -> list[tuple[int, int]]:
        sources = (*topology.rail_sources(rail), *((rail,) if with_own else ()))
        return [(source, numbers[source][topology.domain_of[rail]]) for source in sources]

    return Passage(topology, rank, far, rails, senders, array_bytes)


def to_homes(
    topology: Topology,
    rank: int,
    far: Sequence[int],
    crossings: torch.Tensor,
    array_bytes: tuple[int, ...],
    *,
    with_own: bool = False,
) -> Passage:
    """The way back of `to_rails`; arguments as there, but `crossings` are the numbers of what comes back."""
    numbers = crossings.tolist()

    def senders(home: int) -> list[tuple[int, int]]:
        own = topology.domain_of[home]
        return [
            (topology.rail(home, domain), count)
            for domain, count in enumerate(numbers[home])
            if with_own or domain != own
        ]

    homes = (*topology.rail_sources(rank), *((rank,) if with_own else ()))
    return Passage(topology, rank, far, homes, senders, array_bytes)
