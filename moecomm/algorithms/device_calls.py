"""Calls that the devices make among themselves: hosts only launch them, and neither count nor wait for the peers'.

All ranks make the same calls in the same order here as well, and the kernels number them. What goes wrong stops the
device's later calls of this kind, on every rank, until `check`. The host sees it late: what is known is raised by the
next call or `wait`, all of it by `check`.

A call that one rank's host refuses, and another's makes, cannot be made good: the devices would pair it with the next
one. So who refuses a call says so, and makes another one only when it knows that everybody has refused it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import Tensor

from moecomm.algorithms.calls import LANE_REFUSED, Call
from moecomm.algorithms.mailbox import Mailbox, Notice
from moecomm.algorithms.signature import Operation
from moecomm.devices.queue import OrderedQueue
from moecomm.errors import CommunicatorClosed, PeerFailed
from moecomm.kernels.captured import FOUND_BY_ALL, CapturedCalls
from moecomm.transports.base import Transport

__all__ = ["DeviceCalls", "DeviceJob"]

A = TypeVar("A")
_REMEMBERED = 512  # calls that are looked at; marks last for twice as many
_EPOCH = 10**12  # numbers set aside for the calls between two errors that are forgotten; easy to read


class DeviceJob(Protocol):
    """What the phases of such a call work on.

    Attributes:
        call: the call, with two or three phases.
        placed: what it uses as long as it is in flight, and no other call may.
    """

    @property
    def call(self) -> Call: ...

    @property
    def placed(self) -> object: ...

    def prepare(self, queue: OrderedQueue) -> None:
        """Before the device's work: room for results, and what must live until it is done."""
        ...


class DeviceCalls:
    """These calls of one communicator on one rank. Construction is collective.

    The first phase of a call sends and never waits; each later one lets the device wait for the peers' phase before it.
    Of two phases only one waits, for what is on its way when it is launched. Of three the last one waits for what peers
    launch later: whatever hosts have to do with each other before they launch it must not come behind it on a device.

    Arguments:
        queue: the device's work.
        kernels: make the calls, and know what has stopped them.
        transport: between the hosts, to say that a call is refused.
        timeout: seconds that a wait for that may last.

    Attributes:
        num_calls: so far, refused ones included. Once ranks have found an error at different calls, they differ.
    """

    def __init__(self, queue: OrderedQueue, kernels: CapturedCalls, transport: Transport, timeout: float) -> None:
        self._transport = transport
        self._timeout = timeout
        self._mailbox = Mailbox(transport, 1, 1)  # for its notices
        self._refused: list[int] = []
        self._num_agreed = 0
        self._broken: PeerFailed | None = None
        self._queue = queue
        self._kernels = kernels
        self._seen: Tensor = queue.watch(kernels.status)
        self._words = self._seen.numpy()  # the same memory
        self._outstanding: deque[Call] = deque()
        self.num_calls = 0
        self._next = 0
        self._num_forgotten = 0

    @property
    def in_flight(self) -> tuple[Call, ...]:
        """Calls that have begun and whose last phase has not been launched."""
        return tuple(self._outstanding)

    def begin(self, call: Call) -> Call:
        """Launches the first phase of a call, for which there must be room.

        Raises:
            PeerTimeout, CallMismatch, CapacityExceeded, ValueError: an earlier one has failed, see `check`.
            PeerFailed: some rank has refused an earlier one, and others have not.
        """
        call.sequence = self._take_number()  # in any case: the peers may not know yet
        self._raise_known()
        self._agree()
        try:
            self._queue.begin(call, call.job.prepare)
            call.phases[0].run(call.job)
        except Exception as error:  # there is no room for the results, say
            self._refuse(call.sequence, call.operation, error)
            raise
        call.num_run = 1
        self._outstanding.append(call)
        return call

    def step(self, call: Call) -> None:
        """Launches one more phase of the oldest call in flight, if this one is."""
        if not call.settled:
            self._advance()

    def poll(self, call: Call) -> bool:
        """Launches what is left of this call and those before it, for which the host never waits; True."""
        while not call.settled:
            self.finish_oldest()
        return True

    def finish(self, call: Call) -> Any:
        """Launches what is left of this call and those before it; gives its result, which the caller's stream awaits.

        Raises:
            As `begin`, if it is known already.
        """
        while not call.settled:
            self.finish_oldest()
        result = call.outcome()
        self._queue.hand_over(call)
        return result

    def finish_oldest(self) -> None:
        """Launches what is left of the oldest call in flight; its error waits for whoever waits for it."""
        oldest = self._outstanding[0]
        while not oldest.settled:
            self._advance()

    def finish_long(self) -> None:
        """Launches what is left of calls of three phases, and of those before them."""
        while any(len(call.phases) > 2 for call in self._outstanding):
            self.finish_oldest()

    def _advance(self) -> None:
        call = self._outstanding[0]
        is_last = call.num_run == len(call.phases) - 1
        if is_last:
            self._outstanding.popleft()
        call.next_phase.run(call.job)
        call.num_run += 1
        if not is_last:
            return
        self._queue.settle(call)
        try:
            self._raise_known()
        except Exception as error:  # noqa: BLE001 - kept for whoever waits for the call
            call.fail(error)
        call.settle()

    def abandon(self) -> None:
        """Gives up on all calls in flight, because the communicator closes."""
        while self._outstanding:
            call = self._outstanding.popleft()
            call.error = CommunicatorClosed(f"{call.title} was in flight when the communicator was closed")
            self._queue.settle(call)
            call.settle()

    def refuse(self, operation: Operation, error: Exception) -> None:
        """Counts a call that this rank's arguments do not allow, and tells the peers."""
        self._refuse(self._take_number(), operation, error)

    def _take_number(self) -> int:
        self.num_calls += 1
        self._next += 1
        return self._next - 1

    def _refuse(self, number: int, operation: Operation, error: Exception) -> None:
        text = f"{operation.title} #{number}: {type(error).__name__}: {error}"
        self._mailbox.send_notice(number, 0, text, LANE_REFUSED)
        self._refused.append(number)

    def check(self) -> None:
        """Waits for the device and raises what has gone wrong there; see `CapturedCalls.check`."""
        self._agree()
        try:
            self._queue.ask(self._kernels.check)
        except Exception as error:
            is_forgotten = isinstance(error, FOUND_BY_ALL)  # all else lasts
            self._words[0] = 0 if is_forgotten else 1
            if is_forgotten:
                # Hosts have learnt of it at different calls; from here on they count alike again.
                self._num_forgotten += 1
                self._next = self._num_forgotten * _EPOCH
            raise

    @property
    def has_failed(self) -> bool:
        """Whether a wait has failed, as far as the host knows: what peers still write is not known any more."""
        return int(self._words[0]) > 0

    def ask(self, work: Callable[[], A]) -> A:
        """What work on the device gives; the host waits for it, and for all before."""
        return self._queue.ask(work)

    def _raise_known(self) -> None:
        """Raises what has gone wrong, as far as the host has been told."""
        if self._broken is not None:
            raise self._broken
        if self._words[0] == 0:
            return
        failure = self._queue.ask(self._kernels.failure)
        if failure is not None:
            raise failure

    def _agree(self) -> None:
        """Makes sure that all ranks have refused the same calls, as far as they have come."""
        if self._broken is not None:
            raise self._broken
        transport = self._transport
        if transport.total(LANE_REFUSED) == self._num_agreed * transport.num_ranks:
            return
        transport.wait(LANE_REFUSED, len(self._refused), self._timeout)  # whoever has not come by then is seen below
        for number in range(max(0, self._next - _REMEMBERED), self._next):
            notices = self._mailbox.notices(number)
            if notices and (number not in self._refused or len(notices) < transport.num_ranks):
                self._broken = self._disagreement(notices)
                raise self._broken
        self._num_agreed = len(self._refused)

    def _disagreement(self, notices: list[Notice]) -> PeerFailed:
        told, first = tuple(notice.rank for notice in notices), notices[0]
        others = [rank for rank in range(self._transport.num_ranks) if rank not in told]
        return PeerFailed(
            f"{self._transport.describe_peer(first.rank)} has refused {first.text}; ranks {others} have not, so what "
            "the call was to bring does not come. Construct a new Communicator",
            operation=first.text.split(":")[0],
            peers=told,
        )
