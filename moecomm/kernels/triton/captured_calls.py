"""Which calls have begun and are not completed, as the host launches them: what may begin next."""

from __future__ import annotations

from typing import final

from moecomm.errors import TooManyInFlight

__all__ = ["InFlight"]


@final
class InFlight:
    """Calls of one operation.

    Call n may begin when call n - max_in_flight and those before it are completed, in whatever order the later ones
    are: so every rank has done with call n - 2 * max_in_flight, whose window may be used again. In a graph that begins
    as many calls as it completes this holds in every replay, if it holds once.

    Arguments:
        operation: its name, for messages.
        max_in_flight: as above.
    """

    def __init__(self, operation: str, max_in_flight: int) -> None:
        self._operation = operation
        self._max_in_flight = max_in_flight
        self._begun: dict[int, tuple[object, int]] = {}
        self._next = 0

    def begin(self, placed: object) -> None:
        """Counts a call.

        Raises:
            TooManyInFlight: it uses what another call uses, or one that must be completed before is not.
        """
        if id(placed) in self._begun:
            raise TooManyInFlight(
                f"block: its {self._operation} has begun and is not completed; complete it, or use another block"
            )
        oldest = min((number for _, number in self._begun.values()), default=self._next)
        if oldest <= self._next - self._max_in_flight:
            raise TooManyInFlight(
                f"{self._operation} #{oldest} has begun and is not completed, and {self._operation} #{self._next} "
                f"cannot begin before: max_in_flight is {self._max_in_flight}"
            )
        self._begun[id(placed)] = placed, self._next
        self._next += 1

    def end(self, placed: object) -> None:
        """Counts a call as completed.

        Raises:
            ValueError: none has begun.
        """
        if self._begun.pop(id(placed), None) is None:
            raise ValueError(f"block: no {self._operation} has begun that could be completed")
