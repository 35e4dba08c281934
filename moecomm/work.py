"""Results that are still on their way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from moecomm.algorithms.base import Session
from moecomm.algorithms.calls import Call

__all__ = ["Work"]

T = TypeVar("T")


class Work(Generic[T]):
    """A dispatch or combine that has begun. It needs no thread: what is left of it runs in `wait` or `done`.

    Waiting for it first carries the calls begun before it to their end, so ranks may wait in different orders. This
    holds within one communicator; from one communicator to another, all ranks must go in the same order.

    Arguments:
        session: carries the call.
        call: the call.
        finish: gives the result once asked for; may block.
    """

    def __init__(self, session: Session, call: Call, finish: Callable[[], T]) -> None:
        self._session = session
        self._call: Call | None = call
        self._finish: Callable[[], T] | None = finish
        self._result: T | None = None

    @classmethod
    def done_with(cls, result: T) -> Work[T]:
        """One that has nothing left to do."""
        work = cls.__new__(cls)
        work._call = work._finish = None
        work._result = result
        return work

    def wait(self) -> T:
        """Gives the result, or raises the error; the same one each time.

        Raises:
            PeerTimeout, PeerLost, PeerFailed, CallMismatch, MemoryLimitExceeded: what kept it from being had.
            CommunicatorClosed: the communicator was closed before.
        """
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        assert self._result is not None
        return self._result

    def done(self) -> bool:
        """Does what can be done without waiting; True if `wait` will not block."""
        return self._call is None or self._call.settled or self._session.poll(self._call)

    def step(self) -> None:
        """Runs one more phase of the oldest unfinished call up to this one, as tests that step a group do."""
        if self._call is not None:
            self._session.step(self._call)

    def __repr__(self) -> str:
        if self._call is None:
            return "Work(settled)"
        return f"Work({self._call.title}, {'settled' if self._call.settled else 'in flight'})"
