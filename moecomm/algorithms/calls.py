"""A call in progress: an operation all ranks take part in, cut into phases."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from moecomm.algorithms.signature import Operation, Words

__all__ = [
    "CALL_LANES",
    "LANE_ANSWERED",
    "LANE_BEGUN",
    "LANE_CHUNK",
    "LANE_CREDIT",
    "LANE_CROSSED",
    "LANE_DONE",
    "LANE_GRANTED",
    "LANE_NOTICED",
    "LANE_REFUSED",
    "NUM_LANES",
    "PIECES",
    "TRAFFIC_LANES",
    "Call",
    "Phase",
    "device_count",
]

# Counter slots. A lane's value is the number of calls for which its source has got that far.
LANE_BEGUN = 0
LANE_GRANTED = 1
# Of dispatches of devices over rails alone; it stands where the last one was. Devices count so many pieces of each.
LANE_CROSSED = 2
PIECES = 4
LANE_DONE = 3
# On which a rank may be behind with a call, at the host and at the device.
CALL_LANES = range(LANE_BEGUN, LANE_DONE + 1)
# Of combines of devices over rails alone: each home is told, and only of its own answers, so it stands where the last
# combine was in which this source had some for it.
LANE_ANSWERED = 4
# Counts the calls that its source gave up on.
LANE_NOTICED = 5
# Count chunks, see channels.py: those sent to me, and those of mine that were taken out.
LANE_CHUNK = 6
LANE_CREDIT = 7
# What may let a stream go on.
TRAFFIC_LANES = range(LANE_GRANTED, LANE_CREDIT + 1)
# Counts the calls of the devices alone that its source has refused to make.
LANE_REFUSED = 8
NUM_LANES = 9
_LANE_NAMES = (
    "has not made the call",
    "has not granted receive memory",
    "has not sent its rows over rails",
    "has not finished its part",
    "has not sent its answers over rails",
)


def device_count(lane: int, sequence: int, piece: int = 0, num_pieces: int = 1) -> int:
    """Under which number a device knows that it has come so far with a call, or with a piece of it.

    Ranks need not cut a call alike: the last piece has the number of the call.
    """
    return PIECES * (sequence + 1) - num_pieces + piece if lane == LANE_CROSSED else sequence


class Phase(NamedTuple):
    """A step of a call.

    Attributes:
        name: for messages.
        lane: counter that every rank must have brought up to this call before the step may run; None = no wait.
        run: the step, given the call's job. A stream's says whether it is finished: if not, it runs again as soon as
            there is traffic.
        is_stream: the step does what it can whenever something comes in, and never waits itself.
        orders_device: the same holds between the devices of the ranks, where work is done later than it is given:
            what this phase gives comes after what every rank's device was given before the counter, or those of some
            ranks, see `Call.followed`.
        reads_holders: the step reads messages that other ranks hold for this one, so the counters there must have come
            as far; see message_holders.py.
    """

    name: str
    lane: int | None
    run: Callable[[Any], Any]
    is_stream: bool = False
    orders_device: bool = True
    reads_holders: bool = False


class Call:
    """One operation of one rank, from its first phase to its result.

    Arguments:
        operation: what it does.
        words: what the ranks must agree on.
        phases: the first never waits, each later one only at its start.
        job: what the phases work on; let go of at the end.
        recording: autograd records the call here; see `Routing`.
        by_device: only the devices count it, see `DeviceCalls`; else the hosts do.

    Attributes:
        operation, words, phases, job, recording, by_device: as given.
        sequence: its number in the communicator; set when it begins.
        num_run: phases that have run.
        result: after the last phase.
        error: why it failed, without a traceback.
        settled: all phases have run, or it failed.
        recorded: autograd records the call on some rank.
        is_agreed_failure: the failure follows from what all ranks know: all raise the same error, whoever finds it
            first.
        blocks: arena blocks that peers may still write or read when the call fails.
        awaiting: ranks without which the call's stream cannot go on.
        followed: by lane, the ranks after whose devices' work a phase's own comes; all, where nothing is said.
        stream, finished, kept: see `moecomm.devices.queue`.
    """

    sequence = -1
    num_run = 0
    result: Any = None
    error: Exception | None = None
    settled = False
    recorded = False
    is_agreed_failure = False
    blocks: Sequence[Any] = ()
    awaiting: Sequence[int] = ()
    followed: Mapping[int, Sequence[int]] = MappingProxyType({})
    stream: Any = None
    finished: Any = None
    kept: Any = None

    def __init__(
        self,
        operation: Operation,
        words: Words = (),
        phases: tuple[Phase, ...] = (),
        job: Any = None,
        recording: bool = False,
        by_device: bool = False,
    ) -> None:
        self.operation = operation
        self.words = words
        self.phases = phases
        self.job = job
        self.recording = recording
        self.by_device = by_device

    @property
    def title(self) -> str:
        """Such as `dispatch #17`."""
        return f"{self.operation.title} #{self.sequence}"

    @property
    def next_phase(self) -> Phase:
        """The phase that runs next."""
        return self.phases[self.num_run]

    def fail(self, error: Exception) -> None:
        """Keeps the error for whoever waits, but not its traceback, which would keep all callers' frames alive."""
        self.error = _copied(error)

    def outcome(self) -> Any:
        """The result, or raises the error; the same one each time, once the call is settled."""
        if self.error is not None:
            raise _copied(self.error)
        return self.result

    def settle(self) -> None:
        """Ends the call and lets go of what its phases held."""
        self.settled = True
        self.job = None

    @staticmethod
    def lacking(lane: int) -> str:
        """What a rank has not done whose counter `lane` is behind."""
        return _LANE_NAMES[lane]


def _copied(error: Exception) -> Exception:
    try:
        return copy.copy(error)
    except Exception:  # noqa: BLE001 - an exception of somebody else's that cannot be copied
        return RuntimeError(f"{type(error).__name__}: {error}")
