"""The order of one communicator's work on a device, against the caller's work and against the peers' devices.

`Queue` is what all devices have: it does work, or will do it. `OrderedQueue` is that of a device whose work is done
later than it is given, and so has to be put in order.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from moecomm import _C
from moecomm.kernels.base import RowKernels
from moecomm.kernels.far_runs import FarRun, Memory

__all__ = ["OrderedQueue", "Queue", "Rooms", "Tensors"]

A = TypeVar("A")
T = TypeVar("T", bound=tuple[Any, ...])
Tensors = tuple[Tensor, ...]
Rooms = tuple[Tensor | None, ...]


class Queue(abc.ABC):
    """What a communicator gives its device to do, in order.

    A *call* is any object with the attributes `stream`, `finished` and `kept`, None at first, which are the queue's.
    """

    @abc.abstractmethod
    def run(self, work: Callable[..., object], *arguments: Any) -> None:
        """Does work; it must use only what exists now."""

    @abc.abstractmethod
    def make(self, rooms: Tensors | None, work: Callable[..., Tensors], *arguments: Any) -> Tensors:
        """Does work that gives tensors, and gives those; they are in their rooms where there are any."""

    @abc.abstractmethod
    def fill(self, room: Tensor | None, work: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """The same for work that gives one tensor, and takes as its last argument where to leave it."""

    @abc.abstractmethod
    def call(self, rooms: Rooms | None, work: Callable[..., T], *arguments: Any) -> T:
        """As `make`, for work that gives a tuple of which the host needs something: it waits.

        Host tensors among the arguments are copied to the device. Results without a room come to the host; what is no
        tensor stays as it is, and what the work raises is raised.
        """

    @abc.abstractmethod
    def give(self, rooms: Tensors | None, tensors: Tensors) -> Tensors:
        """Host tensors, on the device, in their rooms."""

    @abc.abstractmethod
    def upload(self, tensor: Tensor) -> Tensor:
        """A host tensor on the device; to be called by work, whose own it is."""

    @abc.abstractmethod
    def count_routes(
        self, kernels: RowKernels, topk_idx: Tensor, expert_rank: Tensor, num_ranks: int, counts: Tensor
    ) -> int:
        """`RowKernels.count_routes`, with `counts` on the host, which waits for the device once.

        Raises:
            ValueError: an id is no expert.
            PeerTimeout, PeerLost: as `OrderedQueue.begin`.
        """

    @abc.abstractmethod
    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copies between addresses."""

    @abc.abstractmethod
    def set_bytes(self, address: int, nbytes: int, value: int) -> None:
        """Gives every byte of memory the value, 0 to 255."""

    @abc.abstractmethod
    def zero_rows(self, address: int, row_bytes: int, spans: Sequence[tuple[int, int]]) -> None:
        """Zeroes rows, by one piece of work however many there are.

        Arguments:
            address: of row 0.
            row_bytes: of a row.
            spans: the first row of each, and the one behind its last; ascending.
        """

    @abc.abstractmethod
    def claim(self, block: _C.Block) -> None:
        """What follows comes after whatever has been done with tensors that lay in this memory before."""

    @abc.abstractmethod
    def claim_for_caller(self, block: _C.Block) -> None:
        """The same for work that the caller's current stream is given from now on."""

    @abc.abstractmethod
    def tensors_in(self, call: Any, block: _C.Block) -> Any:
        """A block as `tensor_of` takes it; it returns when the last tensor dies.

        Arguments:
            call: whose caller's stream the tensors belong to; None: that of the calling thread.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """The host waits until the work is done, but not for devices of ranks that are gone."""


class OrderedQueue(Queue):
    """A queue whose work is done later than it is given.

    The devices' counters, on boards in their memory, say that work is done; they are waited for only once the host
    knows that the work has been given. So a device waits only for what is on its way already.
    """

    @abc.abstractmethod
    def begin(self, call: Any, prepare: Callable[[OrderedQueue], object]) -> None:
        """What follows comes after the work that the caller's current stream has been given so far.

        Arguments:
            call: the call that begins.
            prepare: called before the work, for `room` for the results, and to `keep` the inputs alive.

        Raises:
            PeerTimeout, PeerLost: earlier work has waited in vain for the peers' devices. All that it was to bring is
                of no use, and neither is the communicator: what the devices' counters say is no longer known.
        """

    @abc.abstractmethod
    def is_capturing(self) -> bool:
        """Whether what the caller's current stream is given, and so the work of a call that begins, is a graph's."""

    @abc.abstractmethod
    def ask(self, work: Callable[[], A]) -> A:
        """Does work for which the host waits; gives what it gives, raises what it raises."""

    @abc.abstractmethod
    def watch(self, status: Tensor) -> Tensor:
        """Gives a host tensor that shows a status on the device as it was when a call's work ended; 0 at first.

        Whoever waits on the device looks at the first word of its status, and gives up if it is not 0; so it becomes
        when peers are found to be gone.
        """

    @abc.abstractmethod
    def end_of_use(self) -> Callable[[], tuple[Any, ...]]:
        """Gives, once the tensors of a call that begins now are dead, the events after which nobody uses them.

        It refers to no queue, and may be called in any thread.
        """

    @abc.abstractmethod
    def come_after(self, events: Iterable[Any]) -> None:
        """What follows comes after events."""

    @abc.abstractmethod
    def room(self, call: Any, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for a result of the call, of the caller's current stream."""

    @abc.abstractmethod
    def keep(self, call: Any, *tensors: Tensor | None) -> None:
        """Keeps tensors alive until the call's work is done."""

    @abc.abstractmethod
    def count_crossings(
        self,
        topk_idx: Tensor,
        expert_rank: Tensor,
        num_ranks: int,
        counts: Tensor,
        tally: Callable[[Tensor, Tensor], object],
        crossings: Tensor,
    ) -> int:
        """`count_routes`, and in the same wait what else is to be counted.

        Arguments:
            topk_idx, expert_rank, num_ranks, counts: as there.
            tally: work that counts ids, leaving numbers in a tensor `[C]` int64 on the device; ids may be bad.
            crossings: `[C]` int32 on the host, overwritten.

        Raises:
            ValueError, PeerTimeout, PeerLost: as there.
        """

    def put(self, memory: Memory, runs: Sequence[FarRun], *, beside: bool = False) -> None:
        """Puts runs from a region of mine to the same region of ranks whose memory has no address here.

        They travel with the next `signal_all`: whoever waits for that finds them there. Until this device has done it
        their source must not change.

        Arguments:
            memory: my part of the region; the same at each call before a signal.
            runs: sources and targets are offsets in the region.
            beside: what is given behind the next `signal_all` need not wait until they have arrived; the signal after
                it does, and comes behind them.
        """
        raise AssertionError("all ranks' memory has an address on this device")

    @abc.abstractmethod
    def signal_all(self, lane: int, sequence: int) -> None:
        """Tells all devices that this one has come so far with a call and all before it, once it has."""

    @abc.abstractmethod
    def wait(self, lane: int, sequence: int) -> None:
        """What follows comes after all ranks' `signal_all` for the call."""

    def wait_for(self, ranks: Sequence[int], lane: int, sequence: int) -> None:
        """As `wait`, for some ranks' signals alone."""
        raise AssertionError("all ranks' memory has an address on this device")

    def wait_beside(self, rank: int, lane: int, sequence: int) -> None:
        """What is given beside for a rank from now on comes after its signal for the call, and after all work so far.

        No other work waits for that, but the next `signal_all` that is not beside itself: it comes behind what has been
        given beside.
        """
        raise AssertionError("all ranks' memory has an address on this device")

    def run_beside(self, rank: int, work: Callable[..., object], *arguments: Any) -> None:
        """Does work behind the last `wait_beside` for the rank, and behind what has been run beside for it."""
        raise AssertionError("all ranks' memory has an address on this device")

    def put_beside(
        self, rank: int, memory: Memory, runs: Sequence[FarRun], told: tuple[int, int] | None = None
    ) -> None:
        """Puts runs to a rank, as `put`, behind what has been run beside for it so far.

        What is run beside from now on does not wait for that. Whoever waits for the next `signal_all` finds them there.

        Arguments:
            rank, memory, runs: as there.
            told: a lane and the number of a call: the rank, and no other, is told behind its puts that this one has
                come so far with the call. Such a lane is for nothing else.
        """
        raise AssertionError("all ranks' memory has an address on this device")

    @abc.abstractmethod
    def unless_failed(self, routes: Tensor) -> Tensor:
        """Routes as they are, or -1 in place of all once a wait has failed; to be called by work.

        Where they come from what peers' devices wrote, they may name any place then.
        """

    @abc.abstractmethod
    def is_done(self, rank: int, lane: int, sequence: int) -> bool:
        """Whether a rank's device has come so far with a call; the host waits for the answer, not for the rank."""

    @abc.abstractmethod
    def settle(self, call: Any) -> None:
        """Marks the end of the call's work; what the call keeps alive lives until then."""

    @abc.abstractmethod
    def hand_over(self, call: Any) -> None:
        """Work that the caller's current stream is given from now on comes after the call's."""
