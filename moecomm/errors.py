"""The exceptions of moecomm. A caller's mistake is a plain `ValueError` or `TypeError`; what is here is the world.

MoecommError
  TransportUnavailable      an optional part is missing; says what would fix it
  TransportError            the world failed while peers were talking
    PeerTimeout             a peer did not come within the deadline
    PeerLost                a peer's process has ended
    PeerFailed              a peer gave up on this call and said why
    CallMismatch            the ranks made different calls
  MemoryLimitExceeded       a rank would receive more than its limit
  CapacityExceeded          rows do not fit into a fixed shape; a ValueError, too
  RoutingChanged            routing differs between forward and recompute
  TooManyInFlight           more results outstanding than `max_in_flight`
  CommunicatorClosed        a call on a closed communicator
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CallMismatch",
    "CapacityExceeded",
    "CommunicatorClosed",
    "MemoryLimitExceeded",
    "MoecommError",
    "PeerFailed",
    "PeerLost",
    "PeerTimeout",
    "RoutingChanged",
    "TooManyInFlight",
    "TransportError",
    "TransportUnavailable",
]


class MoecommError(Exception):
    """Base of every exception that moecomm defines. They can be copied and pickled, whatever their arguments."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args, vars(self))


class TransportUnavailable(MoecommError):
    """An optional part cannot be used here.

    Arguments:
        name: the transport, algorithm or tool that was asked for.
        reason: why it cannot be used, as a sentence.
        remedy: what would make it usable, as a sentence.
    """

    def __init__(self, name: str, reason: str, remedy: str) -> None:
        super().__init__(f"{name} is unavailable: {reason} Remedy: {remedy}")
        self.name = name
        self.reason = reason
        self.remedy = remedy


class TransportError(MoecommError):
    """The world failed while peers were talking.

    Arguments:
        message: what happened, as a sentence.
        operation: the call in which it happened, such as `dispatch #17`.
        peers: ranks in the EP group that are concerned.
    """

    def __init__(self, message: str, *, operation: str, peers: tuple[int, ...]) -> None:
        super().__init__(message)
        self.operation = operation
        self.peers = peers


class PeerTimeout(TransportError):
    """A peer did not come within the deadline; the message names who, what was expected and what was seen."""


class PeerLost(TransportError):
    """A peer's process has ended, or it has closed its communicator, while this rank waited for it."""


class PeerFailed(TransportError):
    """A peer gave up on this call; the message carries its reason.

    If it gave up on account of others, for whom it had waited in vain, `peers` are those; else it is in there itself.
    """


class CallMismatch(TransportError):
    """The ranks made different calls, or calls of different shapes; the message shows both."""


class MemoryLimitExceeded(MoecommError):
    """A rank would receive more bytes than its `memory_limit`; raised on every rank alike, nothing is received."""


class CapacityExceeded(MoecommError, ValueError):
    """What arrives has more rows than the fixed shape that it has to fit into.

    Raised on every rank alike, naming rank (slab: expert), rows and room; nothing is received, and further calls work.
    """


class RoutingChanged(MoecommError):
    """Under activation checkpointing a recompute has routed otherwise than the forward."""


class TooManyInFlight(MoecommError):
    """More results are outstanding than `max_in_flight` allows."""


class CommunicatorClosed(MoecommError):
    """The communicator was closed before this call."""


def _rebuilt(kind: type[MoecommError], args: tuple[Any, ...], attributes: dict[str, Any]) -> MoecommError:
    error = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error
