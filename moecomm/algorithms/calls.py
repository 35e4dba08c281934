"""A call in progress: an operation all ranks take part in, cut into phases; and what its ranks must agree on."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

from moecomm.codecs.base import dtype_name

__all__ = ["LANE_BEGUN", "LANE_DONE", "LANE_GRANTED", "NUM_LANES", "Call", "Operation", "Phase", "Signature"]

# Counter slots. A lane's value is the number of calls for which its source has got that far.
LANE_BEGUN = 0
LANE_GRANTED = 1
LANE_DONE = 2
NUM_LANES = 3
_LANE_NAMES = ("has not made the call", "has not granted receive memory", "has not finished its part")


class Operation(enum.IntEnum):
    """What a call does."""

    DISPATCH = 1
    CACHED_DISPATCH = 2
    COMBINE = 3

    @property
    def title(self) -> str:
        """The operation's name in messages."""
        return {1: "dispatch", 2: "dispatch (cached)", 3: "combine"}[int(self)]


_LAYOUTS = ("expert_major", "flat")


@dataclasses.dataclass(frozen=True)
class Signature:
    """What the ranks must agree on.

    Attributes:
        layout: `expert_major` or `flat`.
        expert_alignment: of each expert's rows.
        format: codec, dtype and hidden size of the rows, as their format writes them.
        num_topk: K.
        weights: 1 if a weight travels with each row, else 0.
        origin: number of the dispatch that made the handle; -1 = none.
    """

    layout: str
    expert_alignment: int
    format: tuple[int, int, int]
    num_topk: int
    weights: int
    origin: int

    def words(self) -> tuple[int, ...]:
        """The 8 integers that are sent."""
        return (
            _LAYOUTS.index(self.layout),
            self.expert_alignment,
            *self.format,
            self.num_topk,
            self.weights,
            self.origin,
        )

    @staticmethod
    def describe(operation: int, words: tuple[int, ...]) -> str:
        """A call in words, from what was sent."""
        layout, alignment, codec, dtype, hidden, num_topk, weights, origin = words
        title = Operation(operation).title if operation in list(Operation) else f"operation {operation}"
        text = (
            f"{title}(hidden={hidden}, dtype={dtype_name(dtype)}, num_topk={num_topk}, "
            f"layout={_LAYOUTS[layout] if 0 <= layout < len(_LAYOUTS) else layout}, expert_alignment={alignment}"
        )
        if codec:
            text += f", codec={codec}"
        text += f", travelling weights={'yes' if weights else 'no'}"
        if origin >= 0:
            text += f", handle of dispatch #{origin}"
        return text + ")"


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
