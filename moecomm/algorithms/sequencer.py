"""Runs calls: numbers them, keeps them in order, waits with a deadline, and leaves the ranks in step after a failure.

All ranks make the same calls in the same order. A call waited for before its elders takes them along, so ranks that
wait in different orders do not block each other. Whoever gives up on a call tells the peers why and counts itself as
done with it; the next call then starts clean on every rank.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from moecomm.algorithms import reports
from moecomm.algorithms.calls import CALL_LANES, LANE_BEGUN, LANE_DONE, LANE_NOTICED, NUM_LANES, TRAFFIC_LANES, Call
from moecomm.algorithms.holder_lanes import HolderLanes
from moecomm.algorithms.mailbox import Card, Grant, Mailbox, Parcel
from moecomm.algorithms.signature import Operation, describe
from moecomm.errors import CallMismatch, CommunicatorClosed, PeerFailed, TransportError
from moecomm.transports.base import Transport, WaitOutcome

__all__ = ["Sequencer"]

_log = logging.getLogger("moecomm.sequencer")

# How often a stream that waits looks whether a peer gave up or is gone.
_STREAM_SLICE = 0.05
_REACHED = WaitOutcome.REACHED

# Kinds of notices. An agreed failure follows from what all ranks know, and all raise it alike, whether they find out
# themselves or are told first; a rank that gave up because another did is not worth naming beside that one.
_OWN_REASON, _FOLLOWED, _AGREED = range(3)


class Sequencer:
    """The calls of one communicator on one rank.

    Arguments:
        transport: counters and deadlines.
        mailbox: cards and notices.
        max_in_flight: calls that may be begun and not waited for.
        timeout: seconds that one wait may last.
    """

    holder_lanes: HolderLanes | None = None  # for phases that read what others hold; None: nobody holds anything

    def __init__(self, transport: Transport, mailbox: Mailbox, max_in_flight: int, timeout: float) -> None:
        self.transport = transport
        self.mailbox = mailbox
        self.max_in_flight = max_in_flight
        self.timeout = timeout
        self.num_cards_with_counts = 0
        self._next_sequence = 0
        self._outstanding: deque[Call] = deque()
        self._sent = [0] * NUM_LANES
        self._owed = 0  # one more than the last call that this rank did not carry to its end
        self._quarantine: deque[tuple[int, Any]] = deque()

    @property
    def num_calls(self) -> int:
        """Calls so far, refused ones included."""
        return self._next_sequence

    def begin(self, call: Call) -> Call:
        """Numbers a call, for which there must be room, and runs its first phase; that waits only after a failure."""
        self._number(call)
        self._outstanding.append(call)
        try:
            call.phases[0].run(call.job)
        except BaseException as error:
            self._give_up(call, error)
            self._settle(call)
            raise
        call.num_run = 1
        return call

    def refuse(self, operation: Operation, error: Exception) -> None:
        """Counts a call that this rank's arguments do not allow, and tells the peers, who would wait for it."""
        self.make_room()
        call = Call(operation)
        self._number(call)
        self._give_up(call, error)
        self._catch_up()

    def _number(self, call: Call) -> None:
        call.sequence = self._next_sequence
        self._next_sequence += 1

    def _is_full(self) -> bool:
        # Calls refused since the oldest one count as well: for the peers, who learn of it only when they wait for them,
        # they are in flight, and their messages and windows are numbered.
        return self.num_in_flight >= self.max_in_flight

    def check_room(self, operation: Operation) -> None:
        """Raises TooManyInFlight if one more call may not begin."""
        if self._is_full():
            title = f"{operation.title} #{self._next_sequence}"
            raise reports.too_many(title, self.in_flight, self.num_in_flight, self.max_in_flight)

    @property
    def in_flight(self) -> tuple[Call, ...]:
        """Calls that have begun and are not over, the oldest first."""
        return tuple(self._outstanding)

    @property
    def num_in_flight(self) -> int:
        """Calls that have begun since the oldest one that is in flight, with it; refused ones count as well."""
        return self._next_sequence - self._outstanding[0].sequence if self._outstanding else 0

    def finish_all(self) -> None:
        """Finishes all calls in flight; their errors wait for those who wait for them."""
        while self._outstanding:
            self._run_phase(self._outstanding[0])

    def is_oldest(self, call: Call) -> bool:
        """Whether no call in flight was begun before it."""
        return self._outstanding[0] is call

    def make_room(self) -> None:
        """Finishes the oldest calls until one more may begin; their errors wait for those who wait for them."""
        while self._outstanding and self._is_full():
            self._run_phase(self._outstanding[0])

    def finish(self, call: Call) -> Any:
        """Runs the call to its end, its elders first, and gives its result or raises its error."""
        while not call.settled:
            self._run_phase(self._outstanding[0], wanted=call)
        return call.outcome()

    def step(self, call: Call) -> None:
        """Runs one more phase of the oldest unsettled call up to this one."""
        if not call.settled:
            self._run_phase(self._outstanding[0])

    def poll(self, call: Call) -> bool:
        """Runs what can run without waiting; True once the call is settled."""
        while not call.settled:
            if not self.may_step():
                return False
            oldest = self._outstanding[0]
            num_run = oldest.num_run
            self._run_phase(oldest, may_wait=False)
            if oldest.num_run == num_run and not oldest.settled:
                return False
        return True

    def may_step(self) -> bool:
        """Whether the next phase of the oldest call in flight can run without waiting."""
        oldest = self._outstanding[0]
        phase, at_least = oldest.next_phase, oldest.sequence + 1
        if phase.lane is None:
            return True
        if self.transport.wait(phase.lane, at_least, 0.0) is WaitOutcome.TIMEOUT:
            return False
        return self.holder_lanes is None or not phase.reads_holders or self.holder_lanes.may_go_on(phase.lane, at_least)

    def abandon(self) -> None:
        """Gives up on all calls in flight, because the communicator closes."""
        while self._outstanding:
            call = self._outstanding[0]
            call.error = CommunicatorClosed(f"{call.title} was in flight when the communicator was closed")
            self._give_up(call, call.error)
            self._settle(call)

    def _run_phase(self, call: Call, wanted: Call | None = None, may_wait: bool = True) -> None:
        """Runs a phase; keeps what it raises for whoever waits for the call, or raises it if the call is `wanted`.

        A stream that may not wait does what it can, and stays the next phase unless that finishes it.
        """
        phases, num_run = call.phases, call.num_run
        _, lane, run, is_stream, _, reads_holders = phases[num_run]
        try:
            if lane is not None:
                self._await(call, lane, call.sequence + 1)
                if reads_holders and self.holder_lanes is not None:
                    self.holder_lanes.wait(call, lane, self.timeout, self.check_notices)
            if is_stream:
                if not self._run_stream(call, run, may_wait):
                    return
            else:
                run(call.job)
        except Exception as error:
            call.fail(error)
            self._give_up(call, error)
            self._settle(call)
            if call is wanted:
                raise
            _log.debug("%s failed; whoever waits for it is told", call.title, exc_info=True)
        except BaseException as error:
            # An interrupt from the keyboard, say: the peers must not wait for a rank that has stopped.
            call.error = TransportError(f"{call.title} was interrupted", operation=call.title, peers=())
            self._give_up(call, error)
            self._settle(call)
            raise
        else:
            call.num_run = num_run = num_run + 1
            if num_run == len(phases):
                self._settle(call)

    def _settle(self, call: Call) -> None:
        self._outstanding.remove(call)
        call.settle()
        if self._owed:
            self._catch_up()

    # -- counters --------------------------------------------------------------------------------------------------

    def advance(self, lane: int, call: Call) -> int:
        """What to add to my lane so that it says: this rank has come that far with `call` and all before it."""
        step = call.sequence + 1 - self._sent[lane]
        if step <= 0:
            return 0
        self._sent[lane] += step
        return step

    def signal_all(self, lane: int, call: Call) -> None:
        """Tells every rank that this one has come that far with the call."""
        self.transport.signal_all(lane, self.advance(lane, call))

    def _catch_up(self) -> None:
        """Counts this rank as done with all calls before the oldest in flight: some it did not carry to the end."""
        if self._sent[LANE_DONE] >= self._owed:
            return
        through = self._outstanding[0].sequence if self._outstanding else self._next_sequence
        for lane in CALL_LANES:
            step = through - self._sent[lane]
            if step > 0:
                self._sent[lane] += step
                self.transport.signal_all(lane, step)

    # -- messages --------------------------------------------------------------------------------------------------

    def await_readers(self, call: Call) -> None:
        """Waits until nobody can still be reading what the call overwrites: messages of the call 2k before it.

        Whoever has begun call n - k has finished call n - 2k. That everybody has, this rank knows from finishing call
        n - k itself; if it gave up on that, it has to look.
        """
        begun = call.sequence - self.max_in_flight + 1
        if 0 < begun <= self._owed:
            self._await(call, LANE_BEGUN, begun)

    def send_card(
        self,
        call: Call,
        offsets: tuple[int, ...] = (),
        need: int = 0,
        limit: int = 0,
        *,
        refused: bool = False,
        with_counts: bool = False,
        parcels: Sequence[Parcel] = (),
    ) -> None:
        """Sends the card with which a call begins; see `Card`. Beforehand the readers must have been awaited."""
        self.num_cards_with_counts += with_counts
        words = (call.sequence, call.operation, *call.words)
        rest = (need, limit, refused, call.recording)
        self.mailbox.send_card(words, offsets, rest, LANE_BEGUN, self.advance(LANE_BEGUN, call), with_counts, parcels)

    def cards(self, call: Call) -> list[Card]:
        """Everybody's cards, by rank; they all show the same call.

        Raises:
            CallMismatch: if they do not.
            PeerFailed: if a peer gave up on the call.
        """
        cards = self.mailbox.cards(call.sequence)
        call_made = cards[0][:3]
        agree = all(card[:3] == call_made for card in cards)
        # After reading: whoever has given up may have sent something else since.
        self.check_notices(call)
        if agree:
            call.recorded = any(card.recording for card in cards)
            return cards
        me = self.transport.rank
        mine = cards[me]
        other = next(rank for rank, card in enumerate(cards) if card[:3] != mine[:3])
        theirs = cards[other]
        call.is_agreed_failure = True
        raise CallMismatch(
            f"call #{call.sequence} differs between ranks: rank {me} calls "
            f"{describe(mine.operation, mine.words)}, {self.transport.describe_peer(other)} calls "
            f"{describe(theirs.operation, theirs.words)}; every rank must make the same calls in the "
            "same order",
            operation=call.title,
            peers=(other,),
        )

    def grants(self, call: Call) -> list[Grant]:
        """Everybody's grants, by rank.

        Raises:
            PeerFailed: if a peer gave up on the call.
        """
        grants = self.mailbox.grants(call.sequence)
        self.check_notices(call)
        return grants

    def check_notices(self, call: Call) -> None:
        """Raises PeerFailed, or what the peer raised if all ranks raise it alike, if a peer gave up on this call."""
        if self.transport.total(LANE_NOTICED) == 0:
            return
        notices = [notice for notice in self.mailbox.notices(call.sequence) if notice.rank != self.transport.rank]
        if not notices:
            return
        for notice in notices:
            if notice.kind >= _AGREED:
                call.is_agreed_failure = True
                raise reports.agreed(reports.AGREED[notice.kind - _AGREED], notice, call)
        # A peer that has died is a better answer than a peer that gave up because of it.
        told = {notice.rank for notice in notices}
        # A stream looks at counters by itself.
        last_lane = max(LANE_DONE if phase.is_stream else phase.lane or 0 for phase in call.phases)
        lost = [rank for rank in self._gone() if rank not in told and self._is_behind(rank, last_lane, call)]
        if lost:
            raise reports.lost(self.transport, call, lost)
        raise reports.failed(self.transport, call, [one for one in notices if one.kind != _FOLLOWED] or notices)

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _is_behind(self, rank: int, lane: int, call: Call) -> bool:
        return self.transport.lane(lane, rank) <= call.sequence

    def behind(self, lane: int, call: Call, ranks: Iterable[int]) -> tuple[int, ...]:
        """Those of the ranks that have not come that far with the call; for streams, which wait for some ranks only."""
        return tuple(rank for rank in ranks if self._is_behind(rank, lane, call))

    def _gone(self) -> list[int]:
        return [rank for rank in self.transport.gone() if rank != self.transport.rank]

    def _await(self, call: Call, lane: int, at_least: int) -> None:
        """Waits until everybody has come so far; whether somebody gave up is for the phase to ask."""
        outcome = self.transport.wait(lane, at_least, self.timeout)
        if outcome is _REACHED:  # an enumeration's member costs more than a name
            return
        if outcome is WaitOutcome.LOST:
            raise reports.lost(
                self.transport, call, [rank for rank in self._gone() if self.transport.lane(lane, rank) < at_least]
            )
        raise reports.timed_out(self.transport, call, lane, at_least, self.timeout)

    def _run_stream(self, call: Call, run: Callable[[Any], Any], may_wait: bool) -> bool:
        """Runs a stream until it is finished, or has to wait and may not; whether it is finished."""
        waited = 0.0
        while True:
            # Before it runs, so that what comes in meanwhile is not slept over.
            seen = self.transport.traffic(TRAFFIC_LANES)
            if run(call.job):
                return True
            self.check_notices(call)
            lost = sorted(set(call.awaiting) & set(self._gone()))
            if lost and self.transport.traffic(TRAFFIC_LANES) == seen:
                raise reports.lost(self.transport, call, lost)
            if not may_wait:
                return False
            if self.transport.wait_traffic(TRAFFIC_LANES, seen, min(_STREAM_SLICE, self.timeout)):
                waited = 0.0
                continue
            waited += _STREAM_SLICE
            if waited >= self.timeout:
                raise reports.stalled(self.transport, call, self.timeout)

    # -- failure ---------------------------------------------------------------------------------------------------

    def _give_up(self, call: Call, error: BaseException) -> None:
        """Tells the peers that this rank has stopped, and keeps memory that they may still touch."""
        kind, text = _FOLLOWED if isinstance(error, PeerFailed) else _OWN_REASON, f"{type(error).__name__}: {error}"
        if call.is_agreed_failure and type(error) in reports.AGREED:
            kind, text = _AGREED + reports.AGREED.index(type(error)), str(error)
        blamed = error.peers if isinstance(error, TransportError) else ()
        self.mailbox.send_notice(call.sequence, kind, text, LANE_NOTICED, blamed)
        self.signal_all(LANE_BEGUN, call)
        self._owed = max(self._owed, call.sequence + 1)
        self._quarantine.extend((call.sequence, block) for block in call.blocks)
        call.blocks = ()

    def _is_through(self, rank: int, sequence: int) -> bool:
        """Whether a rank is done with a call."""
        return self.transport.lane(LANE_DONE, rank) > sequence

    def release_quarantine(self) -> None:
        """Lets go of failed calls' memory once every peer is done with the call or gone."""
        while self._quarantine:
            sequence, _ = self._quarantine[0]
            gone = set(self.transport.gone())
            busy = [
                rank
                for rank in range(self.transport.num_ranks)
                if rank not in gone and not self._is_through(rank, sequence)
            ]
            if busy:
                return
            self._quarantine.popleft()
