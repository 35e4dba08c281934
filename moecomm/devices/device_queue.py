"""The queue of a device with streams; see `queue.py` for what it promises.

    caller's stream   ... x ...  |begin            |hand over  ... uses results ...
                                 v                 ^
    our stream                   wait  work ...  mark
                                       ^    |
    boards                          wait    signal       the peers' devices

All work goes to one stream of ours, so what it shares (boards, staging memory, receive memory that it alone has used)
needs no further order. It never waits for anything that is not on its way: the host gives it a wait for the peers'
devices only when the peers' hosts have said that theirs have been given what is waited for. So however few kernels can
be resident, and however streams share hardware queues, what is waited for stands before the wait everywhere.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from moecomm import _C
from moecomm.devices.base import AsynchronousDevice, Event
from moecomm.devices.leases import Lease, Returns, events_of
from moecomm.devices.queue import OrderedQueue, Rooms, Tensors
from moecomm.devices.views import Placed
from moecomm.errors import PeerLost
from moecomm.kernels.base import RowKernels
from moecomm.kernels.summary import HEAD, read_summary

__all__ = ["NUM_SLOTS", "DeviceQueue"]

A = TypeVar("A")
T = TypeVar("T", bound=tuple[Any, ...])
NUM_SLOTS = 5
"""Counters of a board: as many as calls have lanes on which ranks' data depend."""

_SPIN = 2e-4  # seconds that the host looks without a break
_NAP = 2e-5
_PATIENCE = 0.05  # seconds between looks at who is gone


class _Kept:
    """Tensors that work still uses, until an event."""

    __slots__ = ("event", "tensors")

    def __init__(self, event: Event, tensors: object) -> None:
        self.event = event
        self.tensors = tensors


class DeviceQueue(OrderedQueue):
    """See `OrderedQueue`.

    Arguments:
        device: where the work is done.
        boards: by rank, the addresses of the boards, `NUM_SLOTS * R` int64 each, zero at first.
        rank: mine.
        timeout: seconds that one wait on the device may last.
        gone: gives the ranks whose devices will do nothing more.

    Attributes:
        patience_with_lost: seconds that the host waits for work while it knows that a rank has gone; what is done on a
            device ends by itself.
    """

    patience_with_lost = math.inf

    def __init__(
        self,
        device: AsynchronousDevice,
        boards: Sequence[int],
        rank: int,
        timeout: float,
        gone: Callable[[], list[int]],
    ) -> None:
        self._device = device
        self._gone = gone
        self._lost: tuple[int, ...] = ()
        self._kernels = device.signal_kernels()
        self._rank = rank
        self._num_ranks = len(boards)
        self._timeout_ns = int(timeout * 1e9)
        self._board = boards[rank]
        self._stream = device.new_stream()
        self._aside = device.new_stream()  # for what must not stand behind a wait
        # Made on the stream that is to use them, as torch wants it.
        self._boards: Tensor
        self._status: Tensor
        self._stream.submit(lambda: self._make(boards))
        self._stream.synchronize()
        self._seen = device.pinned(torch.zeros(self._status.shape, dtype=torch.int64))
        self._words = self._seen.numpy()  # the same memory
        self._watched = [(self._status, self._seen)]
        self._sent = [0] * NUM_SLOTS
        self._kept: deque[_Kept] = deque()
        self._returns = Returns()
        self._is_closed = False

    def _make(self, boards: Sequence[int]) -> None:
        self._boards = torch.tensor(boards, dtype=torch.int64).to(self._device.torch_device)
        self._status = self._kernels.make_status(self._num_ranks, self._device.torch_device)

    # -- the caller's stream -----------------------------------------------------------------------------------------

    def begin(self, call: Any, prepare: Callable[[OrderedQueue], object]) -> None:
        self._check()
        if not self.is_capturing():  # then events must not be looked at
            self._forget()
        call.stream = self._device.current_stream()
        prepare(self)
        # Behind the rooms, which earlier work of the caller's stream may still be using under another name.
        self._stream.wait(call.stream.record())

    def is_capturing(self) -> bool:
        return self._device.is_capturing()

    def room(self, call: Any, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        room = torch.empty(tuple(shape), dtype=dtype, device=self._device.torch_device)
        self.keep(call, room)
        return room

    def keep(self, call: Any, *tensors: Tensor | None) -> None:
        call.kept = [*(call.kept or ()), *tensors]

    def settle(self, call: Any) -> None:
        for status, seen in self._watched:
            self._stream.submit(functools.partial(seen.copy_, status, non_blocking=True))
        call.finished = _Kept(self._stream.record(), call.kept)
        if not self.is_capturing():  # a graph's memory is whoever's the graph is
            self._kept.append(call.finished)
        call.kept = None

    def hand_over(self, call: Any) -> None:
        kept: _Kept | None = call.finished
        if kept is None:
            return
        here = self._device.current_stream()
        here.wait(kept.event)
        if call.stream is not None and here.is_same(call.stream):
            # From here on torch's own order of the caller's stream holds for them.
            kept.tensors = None

    def _forget(self) -> None:
        """Lets go of what calls kept whose work is done."""
        while self._kept and (self._kept[0].tensors is None or self._kept[0].event.has_passed()):
            self._kept.popleft()

    # -- work --------------------------------------------------------------------------------------------------------

    def run(self, work: Callable[..., object], *arguments: Any) -> None:
        self._stream.submit(functools.partial(work, *arguments))

    def make(self, rooms: Tensors | None, work: Callable[..., Tensors], *arguments: Any) -> Tensors:
        assert rooms is not None

        def fill() -> None:
            # A copy more than a kernel that wrote to the room, of some numbers per token.
            for room, made in zip(rooms, work(*arguments), strict=True):
                room.copy_(made)

        self._stream.submit(fill)
        return rooms

    def fill(self, room: Tensor | None, work: Callable[..., Tensor], *arguments: Any) -> Tensor:
        assert room is not None
        self._stream.submit(functools.partial(work, *arguments, room))
        return room

    def call(self, rooms: Rooms | None, work: Callable[..., T], *arguments: Any) -> T:
        assert rooms is not None

        def tell(rooms: Rooms = rooms) -> T:
            made = work(*map(self._here, arguments))
            parts = [self._placed(room, part) for room, part in zip(rooms, made, strict=True)]
            return cast(T, tuple(parts)) if type(made) is tuple else type(made)(*parts)

        return self.ask(tell)

    def ask(self, work: Callable[[], A]) -> A:
        told: list[A] = []
        failures: list[Exception] = []

        def tell() -> None:
            try:
                told.append(work())
            except Exception as error:  # noqa: BLE001 - raised below, on the thread that has to know
                failures.append(error)
            self._seen.copy_(self._status, non_blocking=True)

        self._stream.submit(tell)
        self._synchronize()
        self._check()
        if failures:
            raise failures[0]
        return told[0]

    def watch(self, status: Tensor) -> Tensor:
        seen = self._device.pinned(torch.zeros(status.shape, dtype=status.dtype))
        self._watched.append((status, seen))
        return seen

    def _here(self, argument: Any) -> Any:
        is_away = isinstance(argument, Tensor) and argument.device != self._device.torch_device
        return self.upload(argument) if is_away else argument

    @staticmethod
    def _placed(room: Tensor | None, part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        return part.cpu() if room is None else room.copy_(part)

    def give(self, rooms: Tensors | None, tensors: Tensors) -> Tensors:
        assert rooms is not None
        for room, tensor in zip(rooms, tensors, strict=True):
            self._stream.submit(functools.partial(room.copy_, self._device.pinned(tensor), non_blocking=True))
        return rooms

    def upload(self, tensor: Tensor) -> Tensor:
        return self._device.pinned(tensor).to(self._device.torch_device, non_blocking=True)

    def count_routes(
        self, kernels: RowKernels, topk_idx: Tensor, expert_rank: Tensor, num_ranks: int, counts: Tensor
    ) -> int:
        return self._count(topk_idx, expert_rank, num_ranks, counts)

    def count_crossings(
        self,
        topk_idx: Tensor,
        expert_rank: Tensor,
        num_ranks: int,
        counts: Tensor,
        tally: Callable[[Tensor, Tensor], object],
        crossings: Tensor,
    ) -> int:
        return self._count(topk_idx, expert_rank, num_ranks, counts, tally, crossings)

    def _count(
        self,
        topk_idx: Tensor,
        expert_rank: Tensor,
        num_ranks: int,
        counts: Tensor,
        tally: Callable[[Tensor, Tensor], object] | None = None,
        crossings: Tensor | None = None,
    ) -> int:
        size = HEAD + expert_rank.numel() + num_ranks
        num_more = 0 if crossings is None else crossings.numel()
        told = self._device.pinned(torch.empty(size + num_more, dtype=torch.int64))

        def tell() -> None:
            summary = torch.empty(told.shape, dtype=torch.int64, device=self._device.torch_device)
            self._device.row_kernels().summarize_routes(topk_idx, expert_rank, num_ranks, summary[:size])
            if tally is not None:
                tally(topk_idx, summary[size:])
            told.copy_(summary, non_blocking=True)
            self._seen.copy_(self._status, non_blocking=True)

        self._stream.submit(tell)
        self._synchronize()
        self._check()
        self._forget()
        if crossings is not None:
            crossings.copy_(told[size:])
        return read_summary(told[:size], topk_idx.shape, expert_rank.numel(), counts)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        if nbytes:
            self._stream.submit(lambda: self._bytes(target, nbytes).copy_(self._bytes(source, nbytes)))

    def set_bytes(self, address: int, nbytes: int, value: int) -> None:
        if nbytes:
            self._stream.submit(lambda: self._bytes(address, nbytes).fill_(value))

    def zero_rows(self, address: int, row_bytes: int, spans: Sequence[tuple[int, int]]) -> None:
        if spans and row_bytes:
            rows = torch.cat([torch.arange(start, end) for start, end in spans])
            wide = torch.int64 if address % 8 == 0 and row_bytes % 8 == 0 else torch.uint8

            def fill() -> None:
                memory = self._bytes(address, spans[-1][1] * row_bytes).view(wide)
                memory.view(-1, row_bytes // wide.itemsize).index_fill_(0, self.upload(rows), 0)

            self._stream.submit(fill)

    def _bytes(self, address: int, nbytes: int) -> Tensor:
        return self._device.bytes_at(address, nbytes, None)

    # -- the peers' devices ------------------------------------------------------------------------------------------

    def signal_all(self, lane: int, sequence: int) -> None:
        n = sequence + 1 - self._sent[lane]
        if n <= 0 or self._is_closed:
            return
        self._sent[lane] += n
        self._send(lane, n)

    def _send(self, lane: int, n: int) -> None:
        """Adds n to this rank's lane of all boards, behind the work given so far."""
        send = functools.partial(self._kernels.signal_all, n=n, status=self._status)
        self.run(send, self._boards, self._rank, lane)

    def wait(self, lane: int, sequence: int) -> None:
        wait = functools.partial(self._kernels.wait, status=self._status, timeout_ns=self._timeout_ns)
        self.run(wait, self._board, lane, sequence + 1)

    def unless_failed(self, routes: Tensor) -> Tensor:
        return torch.where(self._status[0] == 0, routes, -1)

    def is_done(self, rank: int, lane: int, sequence: int) -> bool:
        seen = self._device.pinned(torch.empty(self._num_ranks * NUM_SLOTS, dtype=torch.int64))

        def look() -> None:
            board = self._bytes(self._board, seen.nbytes).view(torch.int64)
            seen.copy_(board, non_blocking=True)

        self._aside.submit(look)
        self._aside.synchronize()
        return int(seen[lane * self._num_ranks + rank]) > sequence

    def _synchronize(self) -> None:
        """The host waits for all work given so far, and ends the devices' waits for ranks that are gone."""
        event = self._stream.record()
        began = time.monotonic()
        look_at = began + _PATIENCE
        while not event.has_passed():
            now = time.monotonic()
            if now - began > _SPIN:
                time.sleep(_NAP)
            if now > look_at:
                look_at = now + _PATIENCE
                gone = tuple(rank for rank in self._gone() if rank != self._rank)
                if gone and not self._lost:
                    self._lost = gone
                    # Waits look at their status, and end when another has failed.
                    for status, _ in self._watched:
                        self._aside.submit(functools.partial(status[:1].fill_, 1))
                if self._lost and now - began > self.patience_with_lost:
                    return

    def _check(self) -> None:
        """Raises what a wait on the device has failed with, as far as the host has been told."""
        if self._lost:
            ranks = ", ".join(map(str, self._lost))
            raise PeerLost(
                f"the device of rank {self._rank} waited for work of ranks {ranks}, which have ended or closed their "
                "communicators; what it was to bring is lost. Construct a new Communicator",
                operation="an earlier call",
                peers=self._lost,
            )
        if self._words[0] != 0:
            self._synchronize()  # the other words may still be on their way
            self._kernels.raise_if_behind(
                self._seen, "an earlier call", describe=lambda rank: f"the device of rank {rank}"
            )

    # -- memory ------------------------------------------------------------------------------------------------------

    def claim(self, block: _C.Block) -> None:
        self.come_after(self._returns.claim(block.address, block.address + block.nbytes))

    def end_of_use(self) -> Callable[[], tuple[Event, ...]]:
        device, stream = self._device, self._device.current_stream()
        # In a capture what follows comes after its stream's work anyhow, and marks mean nothing outside.
        return lambda: () if device.is_capturing() else events_of(stream, device.current_stream)

    def come_after(self, events: Iterable[Event]) -> None:
        for event in events:
            self._stream.wait(event)

    def claim_for_caller(self, block: _C.Block) -> None:
        here = self._device.current_stream()
        for event in (*self._returns.claim(block.address, block.address + block.nbytes), self._stream.record()):
            here.wait(event)

    def tensors_in(self, call: Any, block: _C.Block) -> Placed:
        device, first = self._device, block.address
        stream = device.current_stream() if call is None else call.stream
        # Without a reference to this queue, which a tensor may outlive.
        lease = Lease(block, self._returns, functools.partial(events_of, stream, device.current_stream))
        return Placed(lambda dtype, offset, shape: device.view(first + offset, lease, dtype, shape))

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._synchronize()
        self._kept.clear()
