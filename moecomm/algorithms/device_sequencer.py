"""The sequencer where devices do the work later than it is given.

The host's counters say that a rank has given its device the work of a step. Beside each of them stands one of the
device's, on the same lane, which says that the work is done; so a phase that follows what others' devices do comes
after it on this rank's device, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moecomm.algorithms.calls import CALL_LANES, LANE_BEGUN, LANE_DONE, Call, device_count
from moecomm.algorithms.mailbox import Mailbox
from moecomm.algorithms.sequencer import Sequencer
from moecomm.devices.base import Device
from moecomm.devices.queue import OrderedQueue, Queue
from moecomm.kernels.wire import Wire
from moecomm.transports.base import Transport

__all__ = ["DeviceSequencer", "make_queue", "make_sequencer"]


class DeviceSequencer(Sequencer):
    """The calls of one communicator on one rank, and their order on its device.

    Arguments:
        queue: the device's work.
        transport, mailbox, max_in_flight, timeout: as in `Sequencer`.

    Attributes:
        before_begin: called before a call is given to the device; see `DeviceCalls.finish_long`.
    """

    def __init__(
        self, queue: OrderedQueue, transport: Transport, mailbox: Mailbox, max_in_flight: int, timeout: float
    ) -> None:
        super().__init__(transport, mailbox, max_in_flight, timeout)
        self._queue = queue
        self.before_begin: Callable[[], object] = lambda: None

    def begin(self, call: Call) -> Call:
        if self._queue.is_capturing():
            raise ValueError(
                f"{call.operation.title}: hosts take part in this call, so no graph can hold it. Low-latency calls "
                "that autograd does not record can be captured, and, where all ranks address each other's memory, "
                "throughput calls with a capacity, with their backward; where no compiler and no dispatch mode traces "
                "them and their handle comes from such a call"
            )
        self.before_begin()
        try:
            self._queue.begin(call, call.job.prepare)
        except Exception as error:  # there is no room for the results, say
            self.refuse(call.operation, error)
            raise
        return super().begin(call)

    def finish(self, call: Call) -> Any:
        result = super().finish(call)
        self._queue.hand_over(call)
        return result

    def advance(self, lane: int, call: Call) -> int:
        # First the device: whoever sees the host's counter may wait for the device's.
        if any(phase.lane == lane and phase.orders_device for phase in call.phases):
            self._queue.signal_all(lane, device_count(lane, call.sequence))
        return super().advance(lane, call)

    def await_readers(self, call: Call) -> None:
        super().await_readers(call)
        begun = call.sequence - self.max_in_flight + 1
        if 0 < begun <= self._owed:  # as there: the peers' hosts have begun, their devices may still be reading
            self._queue.wait(LANE_BEGUN, begun - 1)

    def _await(self, call: Call, lane: int, at_least: int) -> None:
        super()._await(call, lane, at_least)
        if call.next_phase.lane != lane or not call.next_phase.orders_device:
            return
        count, followed = device_count(lane, call.sequence), call.followed.get(lane)
        if followed is None:
            self._queue.wait(lane, count)
        else:
            self._queue.wait_for(followed, lane, count)

    def _settle(self, call: Call) -> None:
        self._queue.settle(call)
        super()._settle(call)

    def _catch_up(self) -> None:
        if self._sent[LANE_DONE] < self._owed:
            through = self._outstanding[0].sequence if self._outstanding else self._next_sequence
            for lane in CALL_LANES:
                self._queue.signal_all(lane, device_count(lane, through - 1))
        super()._catch_up()

    def _is_through(self, rank: int, sequence: int) -> bool:
        return super()._is_through(rank, sequence) and self._queue.is_done(rank, LANE_DONE, sequence)


def make_queue(transport: Transport, device: Device, timeout: float) -> Queue:
    """The queue of a rank, with boards that all ranks' devices can address, or reach over a wire. Collective."""
    boards: list[int] = []
    wire: Wire | None = None
    nbytes = device.board_bytes(transport.num_ranks)
    if nbytes:
        region = transport.allocate_on(device, nbytes)
        boards = [transport.peer(region, rank) or 0 for rank in range(transport.num_ranks)]
        if transport.capabilities.device_initiated:
            wire = transport.make_wire(region, device)
    return device.make_queue(boards, transport.rank, timeout, transport.gone, wire)


def make_sequencer(
    queue: Queue, transport: Transport, mailbox: Mailbox, max_in_flight: int, timeout: float
) -> Sequencer:
    """The sequencer that goes with a queue."""
    if isinstance(queue, OrderedQueue):
        return DeviceSequencer(queue, transport, mailbox, max_in_flight, timeout)
    return Sequencer(transport, mailbox, max_in_flight, timeout)
