"""A call in progress: an operation all ranks take part in, cut into phases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from moecomm.algorithms.signature import Operation, Signature

__all__ = ["LANE_BEGUN", "LANE_DONE", "LANE_GRANTED", "LANE_NOTICED", "NUM_LANES", "Call", "Phase"]

# Counter slots. A lane's value is the number of calls for which its source has got that far.
LANE_BEGUN = 0
LANE_GRANTED = 1
LANE_DONE = 2
# Counts the calls that its source gave up on.
LANE_NOTICED = 3
NUM_LANES = 4
_LANE_NAMES = ("has not made the call", "has not granted receive memory", "has not finished its part")


@dataclasses.dataclass(frozen=True)
class Phase:
    """A step of a call.

    Attributes:
        name: for messages.
        lane: counter that every rank must have brought up to this call before the step may run; None = no wait.
        run: the step.
    """

    name: str
    lane: int | None
    run: Callable[[], None]


class Call:
    """One operation of one rank, from its first phase to its result.

    Attributes:
        operation: what it does.
        signature: what the ranks must agree on; None for a call that is only refused.
        sequence: its number in the communicator; set when it begins.
        phases: the first never waits, each later one only at its start.
        result: after the last phase.
        error: why it failed; raised by whoever waits for it.
        settled: all phases have run, or it failed.
    """

    def __init__(self, operation: Operation, signature: Signature | None) -> None:
        self.operation = operation
        self.signature = signature
        self.sequence = -1
        self.phases: tuple[Phase, ...] = ()
        self.num_run = 0
        self.result: Any = None
        self.error: Exception | None = None
        self.settled = False
        self.is_agreed_failure = False
        """The failure follows from what all ranks know: each finds it by itself, and nobody needs to be told."""
        self.blocks: list[Any] = []
        """Arena blocks that peers may still write or read when the call fails."""

    @property
    def title(self) -> str:
        """Such as `dispatch #17`."""
        return f"{self.operation.title} #{self.sequence}"

    @property
    def words(self) -> tuple[int, ...]:
        """The signature as it is sent."""
        assert self.signature is not None
        return self.signature.words()

    @property
    def next_phase(self) -> Phase:
        """The phase that runs next."""
        return self.phases[self.num_run]

    def settle(self) -> None:
        """Ends the call and lets go of what its phases held."""
        self.settled = True
        self.phases = ()

    @staticmethod
    def lacking(lane: int) -> str:
        """What a rank has not done whose counter `lane` is behind."""
        return _LANE_NAMES[lane]
