"""The queue of a device that cannot address the memory of all ranks: it puts to the others, and signals behind that.

    our stream    ... pack rows ...   push                      ...   wait   read
                                      near: release the lane
                                      far:  put, fence, put-with-signal (or put, quiet, signal)

What `device_queue.py` says of the order holds unchanged, also between ranks that are far from each other:

- A signal is one kernel behind the work that it speaks of. To a near rank it releases what earlier kernels stored; to a
  far one it comes behind all that this kernel puts there. Low-latency calls put by themselves, and signal on lanes of
  their own; nothing else is ever put, so nothing else must be ordered.
- The kernel ends when all that it has put has arrived (quiet). So what lies at the source may change from there on, in
  the order of the stream, and a signal of later work says the same of earlier puts.
- Where the rank has work to do meanwhile, such kernels run on a stream beside ours, behind what that was given before
  them. The next one on our stream comes behind them, so all else holds as if both were one.
- What waits for one rank alone can run beside ours as well: on streams of that rank, behind what ours was given before,
  so a late rank does not hold up what others have sent. The next signal, and the end of a call, come behind them.
- A wait acquires the lanes, whoever has added to them, and then makes visible what the network has written.

A wait ends by itself, a put to a rank whose process has ended need not. So the host does not wait for its device for
ever when it knows that a rank has gone; closing then leaves the device, and all symmetric memory, to the process's end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moecomm.devices.base import AsynchronousDevice, Stream
from moecomm.devices.device_queue import DeviceQueue
from moecomm.kernels.far_runs import FarRun, Memory, Runs, make_runs
from moecomm.kernels.wire import Wire

__all__ = ["WireQueue"]

# One program puts a few runs with the least latency; many keep the network busy only if several programs put them. No
# more than two numbers of programs, for each is a kernel to compile.
_FEW_RUNS = 4
_PARTS = 4
_NOTHING = Memory(0, 0)
# So many ranks for whom something runs beside have streams of their own, about as many as a GPU has queues for streams;
# more share them.
_MOST_SIDES = 8


class _Side(NamedTuple):
    """Where work runs that waits for a rank.

    Attributes:
        work: waits, and the work behind them.
        puts: what that puts.
        arrivals: for the kernels that put.
    """

    work: Stream
    puts: Stream
    arrivals: Tensor


class WireQueue(DeviceQueue):
    """See `DeviceQueue`.

    Arguments:
        device, boards, rank, timeout, gone: as there; the board of a far rank is 0.
        wire: how kernels reach everybody.
    """

    patience_with_lost = 5.0  # a put to a rank that has gone may never end

    def __init__(
        self,
        device: AsynchronousDevice,
        boards: Sequence[int],
        rank: int,
        timeout: float,
        gone: Callable[[], list[int]],
        wire: Wire,
    ) -> None:
        super().__init__(device, boards, rank, timeout, gone)
        self._wire = wire
        self._wire_kernels = device.wire_kernels()
        self._memory = _NOTHING
        self._runs: list[FarRun] = []
        self._arrivals: Tensor
        self._arrivals_of: list[Tensor]
        self._no_runs: Runs
        self._is_beside = False  # the next signal
        self._beside = device.new_stream()
        self._apart: list[Stream] = []  # where something runs that our stream does not wait for yet
        self._sides: dict[int, _Side] = {}  # by rank
        self._told: dict[tuple[int, int], int] = {}  # by rank and lane, what that rank alone was told
        self._one_of: Tensor  # [R, R]: for each rank, it alone
        self._stream.submit(self._make_tables)
        self._stream.synchronize()

    def _make_tables(self) -> None:
        where = self._device.torch_device
        # A row for each stream that puts: ours and that beside it, which never do at a time, and those of ranks.
        self._arrivals, *self._arrivals_of = torch.zeros(
            1 + _MOST_SIDES, self._num_ranks, dtype=torch.int32, device=where
        )
        self._no_runs = make_runs([], self._num_ranks, where)
        self._one_of = torch.eye(self._num_ranks, dtype=torch.int32, device=where)

    def put(self, memory: Memory, runs: Sequence[FarRun], *, beside: bool = False) -> None:
        assert not self._runs or memory == self._memory, "runs of one signal lie in one region"
        self._memory = memory
        self._runs += runs
        self._is_beside = beside

    def _send(self, lane: int, n: int) -> None:
        runs, self._runs = self._runs, []
        push = functools.partial(self._push, self._memory if runs else _NOTHING, runs, lane, n)
        if not self._is_beside:
            self._join()  # pushes share a table, and what is signalled has been done
            self.run(push)
            return
        self._is_beside = False
        self._depart(self._beside)
        self._beside.submit(push)

    def _depart(self, stream: Stream) -> None:
        """What a stream beside ours is given from here on comes after what ours has been given."""
        stream.wait(self._stream.record())
        if stream not in self._apart:
            self._apart.append(stream)

    def _join(self) -> None:
        """What our stream is given from here on comes after what runs beside."""
        for stream in self._apart:
            self._stream.wait(stream.record())
        self._apart.clear()

    def settle(self, call: Any) -> None:
        self._join()  # of a call that has failed: what it keeps may be in use there
        super().settle(call)

    def close(self) -> None:
        self._join()
        super().close()

    def _push(self, memory: Memory, runs: Sequence[FarRun], lane: int, n: int) -> None:
        self._launch(memory, runs, lane, n=n, arrivals=self._arrivals)

    def _launch(
        self, memory: Memory, runs: Sequence[FarRun], lane: int, *, n: int, arrivals: Tensor, to: int | None = None
    ) -> None:
        table = make_runs(runs, self._num_ranks, self._device.torch_device) if runs else self._no_runs
        parts = 1 if table.most <= _FEW_RUNS else _PARTS
        self._wire_kernels.push(
            *(self._wire, table, memory, lane),
            n=n,
            parts=parts,
            arrivals=arrivals,
            status=self._status,
            to=to,
        )

    def wait(self, lane: int, sequence: int) -> None:
        self.run(self._wait, lane, sequence)

    def _wait(self, lane: int, sequence: int, awaited: Tensor | None = None) -> None:
        self._wire_kernels.wait(
            *(self._wire, lane, sequence + 1), status=self._status, timeout_ns=self._timeout_ns, awaited=awaited
        )

    def wait_for(self, ranks: Sequence[int], lane: int, sequence: int) -> None:
        awaited = torch.zeros(self._num_ranks, dtype=torch.int32)
        awaited[list(ranks)] = 1
        self.run(lambda: self._wait(lane, sequence, self.upload(awaited)))

    # -- beside, for one rank ----------------------------------------------------------------------------------------

    def wait_beside(self, rank: int, lane: int, sequence: int) -> None:
        work = self._side(rank).work
        self._depart(work)
        work.submit(functools.partial(self._wait, lane, sequence, self._one_of[rank]))

    def run_beside(self, rank: int, work: Callable[..., object], *arguments: Any) -> None:
        self._side(rank).work.submit(functools.partial(work, *arguments))

    def put_beside(
        self, rank: int, memory: Memory, runs: Sequence[FarRun], told: tuple[int, int] | None = None
    ) -> None:
        side, lane, n = self._side(rank), 0, 0
        if told is not None:
            lane, sequence = told
            n = sequence + 1 - self._told.get((rank, lane), 0)
            self._told[rank, lane] = sequence + 1
        self._depart(side.puts)
        side.puts.wait(side.work.record())
        side.puts.submit(functools.partial(self._launch, memory, runs, lane, n=n, arrivals=side.arrivals, to=rank))

    def _side(self, rank: int) -> _Side:
        if rank not in self._sides:
            number = len(self._sides)
            if number < _MOST_SIDES:
                made = _Side(self._device.new_stream(), self._device.new_stream(), self._arrivals_of[number])
            else:
                made = list(self._sides.values())[number % _MOST_SIDES]
            self._sides[rank] = made
        return self._sides[rank]
