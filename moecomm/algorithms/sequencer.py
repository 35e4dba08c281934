"""Runs calls: numbers them, keeps them in order, waits with a deadline, and leaves the ranks in step after a failure.

All ranks make the same calls in the same order. A call waited for before its elders takes them along, so ranks that
wait in different orders do not block each other. Whoever gives up on a call tells the peers why and counts itself as
done with it; the next call then starts clean on every rank.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from moecomm.algorithms.calls import LANE_BEGUN, LANE_DONE, LANE_GRANTED, LANE_NOTICED, NUM_LANES, Call
from moecomm.algorithms.mailbox import Card, Mailbox
from moecomm.algorithms.signature import Operation, Signature
from moecomm.errors import CallMismatch, PeerFailed, PeerLost, PeerTimeout, TooManyInFlight, TransportError
from moecomm.transports.base import Transport, WaitOutcome

__all__ = ["Sequencer"]


class Sequencer:
    """The calls of one communicator on one rank.

    Arguments:
        transport: counters and deadlines.
        mailbox: cards and notices.
        max_in_flight: calls that may be begun and not waited for.
        timeout: seconds that one wait may last.
    """

    def __init__(self, transport: Transport, mailbox: Mailbox, max_in_flight: int, timeout: float) -> None:
        self.transport = transport
        self.mailbox = mailbox
        self.max_in_flight = max_in_flight
        self.timeout = timeout
        self.num_cards_with_counts = 0
        self._next_sequence = 0
        self._outstanding: deque[Call] = deque()
        self._sent = [0] * NUM_LANES
        self._quarantine: deque[tuple[int, Any]] = deque()

    def begin(self, call: Call) -> None:
        """Numbers a call and runs its first phase.

        Raises:
            TooManyInFlight: if `max_in_flight` calls are outstanding.
        """
        self.check_capacity(call)
        self._number(call)
        self._outstanding.append(call)
        try:
            call.phases[0].run()
        except Exception as error:
            self._give_up(call, error, reached_lane=LANE_BEGUN)
            self._settle(call)
            raise
        call.num_run = 1

    def _settle(self, call: Call) -> None:
        self._outstanding.remove(call)
        call.settle()

    def check_capacity(self, call: Call) -> None:
        """Raises TooManyInFlight if one more call may not begin."""
        if len(self._outstanding) >= self.max_in_flight:
            waiting = ", ".join(other.title for other in self._outstanding)
            raise TooManyInFlight(
                f"{call.operation.title}: {len(self._outstanding)} calls are in flight ({waiting}) and max_in_flight "
                f"is {self.max_in_flight}; wait for one of them first, or construct the Communicator with a larger one"
            )

    def make_room(self) -> None:
        """Finishes the oldest calls until one more may begin; their errors wait for those who wait for them."""
        while len(self._outstanding) >= self.max_in_flight:
            self._run_phase(self._outstanding[0])

    def refuse(self, operation: Operation, error: Exception) -> None:
        """Counts a call that this rank's arguments do not allow, and tells the peers, who would wait for it."""
        call = Call(operation, None)
        self._number(call)
        self._give_up(call, error, reached_lane=LANE_BEGUN)

    def _number(self, call: Call) -> None:
        call.sequence = self._next_sequence
        self._next_sequence += 1

    def finish(self, call: Call) -> Any:
        """Runs the call to its end, its elders first, and gives its result or raises its error."""
        while not call.settled:
            self._run_phase(self._outstanding[0])
        if call.error is not None:
            raise call.error
        return call.result

    def step(self, call: Call) -> None:
        """Runs one more phase of the oldest unsettled call up to this one."""
        if not call.settled:
            self._run_phase(self._outstanding[0])

    def poll(self, call: Call) -> bool:
        """Runs what can run without waiting; True once the call is settled."""
        while not call.settled:
            oldest = self._outstanding[0]
            lane = oldest.next_phase.lane
            if lane is not None and self.transport.wait(lane, oldest.sequence + 1, 0.0) is WaitOutcome.TIMEOUT:
                return False
            self._run_phase(oldest)
        return True

    def _run_phase(self, call: Call) -> None:
        phase = call.next_phase
        try:
            if phase.lane is not None:
                self._await(call, phase.lane)
            phase.run()
        except Exception as error:  # noqa: BLE001 - kept for whoever waits for the call
            call.error = error
            self._give_up(call, error, reached_lane=LANE_DONE)
        except BaseException as error:
            # An interrupt from the keyboard, say: the peers must not wait for a rank that has stopped.
            call.error = TransportError(f"{call.title} was interrupted", operation=call.title, peers=())
            self._give_up(call, error, reached_lane=LANE_DONE)
            self._settle(call)
            raise
        else:
            call.num_run += 1
        if call.error is not None or call.num_run == len(call.phases):
            self._settle(call)

    # -- counters --------------------------------------------------------------------------------------------------

    def advance(self, lane: int, call: Call) -> int:
        """What to add to my lane so that it says: this rank has come that far with `call` and all before it."""
        target = call.sequence + 1
        step = max(0, target - self._sent[lane])
        self._sent[lane] += step
        return step

    def signal_all(self, lane: int, call: Call) -> None:
        """Tells every rank that this one has come that far with the call."""
        self.transport.signal_all(lane, self.advance(lane, call))

    def send_card(self, card: Card, call: Call, *, with_counts: bool) -> None:
        """Sends the card with which a call begins."""
        self.num_cards_with_counts += with_counts
        self.mailbox.send_card(card, LANE_BEGUN, self.advance(LANE_BEGUN, call), with_counts=with_counts)

    def cards(self, call: Call) -> list[Card]:
        """Everybody's cards, by rank; they all show the same call.

        Raises:
            CallMismatch: if they do not.
        """
        cards = self.mailbox.cards(call.sequence)
        if self.mailbox.all_agree(call.sequence):
            return cards
        me = self.transport.rank
        mine = cards[me]
        other = next(rank for rank, card in enumerate(cards) if card[:3] != mine[:3])
        theirs = cards[other]
        call.is_agreed_failure = True
        raise CallMismatch(
            f"call #{call.sequence} differs between ranks: rank {me} calls "
            f"{Signature.describe(mine.operation, mine.signature)}, {self.transport.describe_peer(other)} calls "
            f"{Signature.describe(theirs.operation, theirs.signature)}; every rank must make the same calls in the "
            "same order",
            operation=call.title,
            peers=(other,),
        )

    def check_notices(self, call: Call) -> None:
        """Raises PeerFailed if a peer gave up on this call."""
        if self.transport.total(LANE_NOTICED) == 0:
            return
        notices = [(rank, text) for rank, text in self.mailbox.notices(call.sequence) if rank != self.transport.rank]
        if not notices:
            return
        # A peer that has died is the better answer than a peer that gave up because of it.
        self._raise_if_lost(call, call.next_phase.lane)
        ranks = tuple(rank for rank, _ in notices)
        texts = "; ".join(f"{self.transport.describe_peer(rank)} gave up: {text}" for rank, text in notices)
        raise PeerFailed(f"{call.title}: {texts}", operation=call.title, peers=ranks)

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _behind(self, call: Call, lane: int) -> list[int]:
        ranks = range(self.transport.num_ranks)
        return [rank for rank in ranks if self.transport.lane(lane, rank) <= call.sequence]

    def _await(self, call: Call, lane: int) -> None:
        outcome = self.transport.wait(lane, call.sequence + 1, self.timeout)
        if outcome is WaitOutcome.LOST:
            self._raise_if_lost(call, lane)
        if outcome is WaitOutcome.TIMEOUT:
            raise self._timeout(call, lane)
        self.check_notices(call)

    def _raise_if_lost(self, call: Call, lane: int | None) -> None:
        gone = [rank for rank in self.transport.gone() if rank != self.transport.rank]
        if lane is not None and gone:
            behind = set(self._behind(call, lane))
            gone = [rank for rank in gone if rank in behind] or gone
        if not gone:
            return
        who = ", ".join(self.transport.describe_peer(rank) for rank in gone)
        seen = "; ".join(f"rank {rank} {self._progress(rank, call)}" for rank in gone)
        raise PeerLost(
            f"{call.title}: lost {who}: the process has ended or closed its communicator while rank "
            f"{self.transport.rank} was in phase {call.next_phase.name!r}; last seen: {seen}",
            operation=call.title,
            peers=tuple(gone),
        )

    def _progress(self, rank: int, call: Call) -> str:
        begun = self.transport.lane(LANE_BEGUN, rank)
        if begun <= call.sequence:
            return f"had made {begun} calls, not yet #{call.sequence}"
        if self.transport.lane(LANE_DONE, rank) > call.sequence:
            return f"had finished its part of #{call.sequence}"
        if self.transport.lane(LANE_GRANTED, rank) > call.sequence:
            return f"had granted receive memory in #{call.sequence} and was moving rows"
        return f"had begun #{call.sequence}"

    def _timeout(self, call: Call, lane: int) -> PeerTimeout:
        behind = self._behind(call, lane)
        gone = set(self.transport.gone())
        details = "; ".join(
            f"{self.transport.describe_peer(rank)} {call.lacking(lane)}: counter at {self.transport.lane(lane, rank)}, "
            f"expected {call.sequence + 1}, its process {'has ended' if rank in gone else 'lives'}"
            for rank in behind
        )
        return PeerTimeout(
            f"{call.title}, phase {call.next_phase.name!r}: rank {self.transport.rank} waited {self.timeout:g} s for "
            f"{details}. Every rank must make the same calls, also with zero tokens; if a rank is merely slow, "
            f"construct the Communicator with a larger timeout",
            operation=call.title,
            peers=tuple(behind),
        )

    # -- failure ---------------------------------------------------------------------------------------------------

    def _give_up(self, call: Call, error: BaseException, *, reached_lane: int) -> None:
        """Tells the peers, counts this rank as done up to `reached_lane`, and keeps memory that peers may touch."""
        text = f"{type(error).__name__}: {error}"
        if not call.is_agreed_failure:
            self.mailbox.send_notice(call.sequence, text, LANE_NOTICED)
        for lane in range(LANE_BEGUN, reached_lane + 1):
            self.signal_all(lane, call)
        self._quarantine.extend((call.sequence, block) for block in call.blocks)
        call.blocks = []

    def release_quarantine(self) -> None:
        """Lets go of failed calls' memory once every peer is done with the call or gone."""
        while self._quarantine:
            sequence, _ = self._quarantine[0]
            gone = set(self.transport.gone())
            busy = [
                rank
                for rank in range(self.transport.num_ranks)
                if rank not in gone and self.transport.lane(LANE_DONE, rank) <= sequence
            ]
            if busy:
                return
            self._quarantine.popleft()
