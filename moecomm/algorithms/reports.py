"""The errors of a call whose peers do not do their part: who, how far they were last seen, what would help."""

from __future__ import annotations

from collections.abc import Sequence

from moecomm.algorithms.calls import LANE_BEGUN, LANE_DONE, LANE_GRANTED, Call
from moecomm.algorithms.mailbox import Notice
from moecomm.errors import (
    CallMismatch,
    CapacityExceeded,
    MemoryLimitExceeded,
    PeerFailed,
    PeerLost,
    PeerTimeout,
    TooManyInFlight,
)
from moecomm.transports.base import Transport

__all__ = ["AGREED", "agreed", "failed", "lost", "not_held", "stalled", "timed_out", "too_many"]

AGREED: tuple[type[Exception], ...] = (ValueError, MemoryLimitExceeded, CapacityExceeded, CallMismatch)
"""What all ranks raise alike, in the order of the kinds of notices."""

_RAISE_LIMIT = "if a rank is merely slow, construct the Communicator with a larger timeout"


def lost(transport: Transport, call: Call, ranks: Sequence[int]) -> PeerLost:
    """Ranks that have gone and were needed."""
    who = ", ".join(transport.describe_peer(rank) for rank in ranks)
    seen = "; ".join(f"rank {rank} {_progress(transport, rank, call)}" for rank in ranks)
    return PeerLost(
        f"{call.title}: lost {who}: the process has ended or closed its communicator while rank "
        f"{transport.rank} was in phase {call.next_phase.name!r}; last seen: {seen}",
        operation=call.title,
        peers=tuple(ranks),
    )


def _progress(transport: Transport, rank: int, call: Call) -> str:
    begun = transport.lane(LANE_BEGUN, rank)
    if begun <= call.sequence:
        return f"had made {begun} calls, not yet #{call.sequence}"
    if transport.lane(LANE_DONE, rank) > call.sequence:
        return f"had finished its part of #{call.sequence}"
    if transport.lane(LANE_GRANTED, rank) > call.sequence:
        return f"had granted receive memory in #{call.sequence} and was moving rows"
    return f"had begun #{call.sequence}"


def timed_out(transport: Transport, call: Call, lane: int, at_least: int, timeout: float) -> PeerTimeout:
    """Ranks whose counter `lane` was behind when the wait ended."""
    behind = [rank for rank in range(transport.num_ranks) if transport.lane(lane, rank) < at_least]
    gone = set(transport.gone())
    details = "; ".join(
        f"{transport.describe_peer(rank)} {call.lacking(lane)}: counter at {transport.lane(lane, rank)}, "
        f"expected {at_least}, {_life(transport, rank, rank in gone)}"
        for rank in behind
    )
    return PeerTimeout(
        f"{call.title}, phase {call.next_phase.name!r}: rank {transport.rank} waited {timeout:g} s for "
        f"{details}. Every rank must make the same calls, also with zero tokens; {_RAISE_LIMIT}",
        operation=call.title,
        peers=tuple(behind),
    )


def _life(transport: Transport, rank: int, is_gone: bool) -> str:
    if is_gone:
        return "its process has ended"
    is_seen = transport.peers[rank].host == transport.peers[transport.rank].host
    return "its process lives" if is_seen else "nothing says that its process has ended"


def not_held(transport: Transport, call: Call, lanes: Sequence[tuple[int, int]], timeout: float) -> PeerTimeout:
    """Messages that have not come to the ranks that hold them for this one: pairs of holder and source."""
    who = "; ".join(
        f"what {transport.describe_peer(source)} sent to {transport.describe_peer(holder)}" for holder, source in lanes
    )
    return PeerTimeout(
        f"{call.title}, phase {call.next_phase.name!r}: rank {transport.rank} waited {timeout:g} s for {who}; it "
        f"was not taken in there; {_RAISE_LIMIT}",
        operation=call.title,
        peers=tuple(sorted({rank for lane in lanes for rank in lane})),
    )


def stalled(transport: Transport, call: Call, timeout: float) -> PeerTimeout:
    """A stream into which nothing came from the ranks that it awaits."""
    who = ", ".join(transport.describe_peer(rank) for rank in call.awaiting)
    return PeerTimeout(
        f"{call.title}, phase {call.next_phase.name!r}: rank {transport.rank} waited {timeout:g} s for rows, or for "
        f"room for rows, and nothing came from {who}, of whom nothing says that they have ended; {_RAISE_LIMIT}",
        operation=call.title,
        peers=tuple(call.awaiting),
    )


def failed(transport: Transport, call: Call, notices: Sequence[Notice]) -> PeerFailed:
    """Ranks that gave up on the call; its `peers` are those on whose account they did, or they themselves."""
    texts = "; ".join(f"{transport.describe_peer(notice.rank)} gave up: {notice.text}" for notice in notices)
    causes: set[int] = set()
    for notice in notices:
        causes.update({*notice.blamed} - {transport.rank} or {notice.rank})
    return PeerFailed(f"{call.title}: {texts}", operation=call.title, peers=tuple(sorted(causes)))


def agreed(kind: type[Exception], notice: Notice, call: Call) -> Exception:
    """What a peer has raised and all ranks raise alike."""
    if kind is CallMismatch:
        return CallMismatch(notice.text, operation=call.title, peers=(notice.rank,))
    return kind(notice.text)


def too_many(title: str, in_flight: Sequence[Call], num_begun: int, most: int) -> TooManyInFlight:
    """One call more than may be in flight; those that have begun since the oldest one count, also if refused."""
    oldest = in_flight[0].title
    return TooManyInFlight(
        f"{title}: {num_begun} calls have begun since {oldest}, which is in flight (all that are: "
        f"{', '.join(call.title for call in in_flight)}), and max_in_flight is {most}; first call wait() on what "
        f"{oldest} gave, or construct the Communicator with a larger max_in_flight"
    )
