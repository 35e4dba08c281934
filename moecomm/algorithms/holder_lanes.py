"""Waits for messages that other ranks hold for this one, on the counters of those ranks; see message_holders.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moecomm.algorithms import reports
from moecomm.algorithms.calls import Call
from moecomm.transports.base import Transport, WaitOutcome

__all__ = ["HolderLanes"]

# How often it is looked whether a rank gave up.
_SLICE = 0.05


class HolderLanes:
    """Counters of one rank's neighbours that say what they hold for it.

    Arguments:
        transport: of the rank.
        lanes: pairs of a holder and a source.
    """

    def __init__(self, transport: Transport, lanes: Sequence[tuple[int, int]]) -> None:
        self._transport = transport
        self._lanes = tuple(lanes)

    def may_go_on(self, lane: int, at_least: int) -> bool:
        """Whether there is nothing left to wait for."""
        return self._transport.wait_at(lane, self._lanes, at_least, 0.0) is not WaitOutcome.TIMEOUT

    def wait(self, call: Call, lane: int, timeout: float, check_notices: Callable[[Call], None]) -> None:
        """Waits until what others hold for this call has come to them; the sources have sent it already.

        Arguments:
            call: which.
            lane: counter that must have been brought up to it.
            timeout: seconds.
            check_notices: raises if a rank gave up on the call: also a holder whose source is lost.

        Raises:
            PeerLost: a holder has gone.
            PeerTimeout: something has not come in time.
        """
        transport, at_least, waited = self._transport, call.sequence + 1, 0.0
        while True:
            some = min(_SLICE, timeout - waited)
            outcome = transport.wait_at(lane, self._lanes, at_least, some)
            if outcome is WaitOutcome.REACHED:
                return
            check_notices(call)
            behind = [pair for pair in self._lanes if transport.lane_at(lane, *pair) < at_least]
            if not behind:  # in the meantime it has come, also to a holder who then left
                return
            if outcome is WaitOutcome.LOST:
                gone = {holder for holder, _ in behind} & set(transport.gone())
                raise reports.lost(transport, call, sorted(gone))
            waited += some
            if waited >= timeout:
                raise reports.not_held(transport, call, behind, timeout)
