"""Calls that the devices make among themselves: hosts only launch them, and neither count nor wait for the peers'.

All ranks make the same calls in the same order here as well, and the kernels number them. What goes wrong stops the
device's later calls of this kind, on every rank, until `check`. The host sees it late: what is known is raised by the
next call or `wait`, all of it by `check`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import Tensor

from moecomm.algorithms.calls import Call
from moecomm.devices.queue import OrderedQueue
from moecomm.errors import CommunicatorClosed
from moecomm.kernels.captured import CapturedCalls

__all__ = ["DeviceCalls", "DeviceJob"]

A = TypeVar("A")


class DeviceJob(Protocol):
    """What the phases of such a call work on.

    Attributes:
        call: the call, with two phases.
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
    """These calls of one communicator on one rank.

    A call has two phases: the first one sends and never waits, the second one lets the device wait for the peers'.

    Arguments:
        queue: the device's work.
        kernels: make the calls, and know what has stopped them.

    Attributes:
        num_calls: so far.
    """

    def __init__(self, queue: OrderedQueue, kernels: CapturedCalls) -> None:
        self._queue = queue
        self._kernels = kernels
        self._seen: Tensor = queue.watch(kernels.status)
        self._words = self._seen.numpy()  # the same memory
        self._outstanding: deque[Call] = deque()
        self.num_calls = 0

    @property
    def in_flight(self) -> tuple[Call, ...]:
        """Calls that have begun and whose second phase has not been launched."""
        return tuple(self._outstanding)

    def begin(self, call: Call) -> Call:
        """Launches the first phase of a call, for which there must be room.

        Raises:
            PeerTimeout, CallMismatch, CapacityExceeded, ValueError: an earlier one has failed, see `check`.
        """
        self._raise_known()
        call.sequence = self.num_calls
        self._queue.begin(call, call.job.prepare)
        call.phases[0].run(call.job)
        call.num_run = 1
        self.num_calls += 1
        self._outstanding.append(call)
        return call

    def step(self, call: Call) -> None:
        """Launches what is left of the oldest call in flight, if this one is."""
        if not call.settled:
            self.finish_oldest()

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
        call = self._outstanding.popleft()
        call.phases[1].run(call.job)
        call.num_run = 2
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

    def check(self) -> None:
        """Waits for the device and raises what has gone wrong there; see `CapturedCalls.check`."""
        try:
            self._queue.ask(self._kernels.check)
        finally:
            self._seen.zero_()

    def ask(self, work: Callable[[], A]) -> A:
        """What work on the device gives; the host waits for it, and for all before."""
        return self._queue.ask(work)

    def _raise_known(self) -> None:
        """Raises what has gone wrong, as far as the host has been told."""
        if self._words[0] == 0:
            return
        failure = self._queue.ask(self._kernels.failure)
        if failure is not None:
            raise failure
