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
- A wait acquires the lanes, whoever has added to them, and then makes visible what the network has written.

A wait ends by itself, a put to a rank whose process has ended need not. So the host does not wait for its device for
ever when it knows that a rank has gone; closing then leaves the device, and all symmetric memory, to the process's end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moecomm.devices.base import AsynchronousDevice
from moecomm.devices.device_queue import DeviceQueue
from moecomm.kernels.far_runs import FarRun, Memory, Runs, make_runs
from moecomm.kernels.wire import Wire

__all__ = ["WireQueue"]

# One program puts a few runs with the least latency; many keep the network busy only if several programs put them. No
# more than two numbers of programs, for each is a kernel to compile.
_FEW_RUNS = 4
_PARTS = 4
_NOTHING = Memory(0, 0)


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
        self._no_runs: Runs
        self._is_beside = False  # the next signal
        self._beside = device.new_stream()
        self._is_apart = False  # something runs there that our stream does not wait for yet
        self._stream.submit(self._make_tables)
        self._stream.synchronize()

    def _make_tables(self) -> None:
        where = self._device.torch_device
        self._arrivals = torch.zeros(self._num_ranks, dtype=torch.int32, device=where)
        self._no_runs = make_runs([], self._num_ranks, where)

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
        self._is_beside, self._is_apart = False, True
        self._beside.wait(self._stream.record())
        self._beside.submit(push)

    def _join(self) -> None:
        """What our stream is given from here on comes after what runs beside."""
        if self._is_apart:
            self._is_apart = False
            self._stream.wait(self._beside.record())

    def close(self) -> None:
        self._join()
        super().close()

    def _push(self, memory: Memory, runs: Sequence[FarRun], lane: int, n: int) -> None:
        table = make_runs(runs, self._num_ranks, self._device.torch_device) if runs else self._no_runs
        parts = 1 if table.most <= _FEW_RUNS else _PARTS
        self._wire_kernels.push(
            *(self._wire, table, memory, lane),
            n=n,
            parts=parts,
            arrivals=self._arrivals,
            status=self._status,
        )

    def wait(self, lane: int, sequence: int) -> None:
        wait = functools.partial(self._wire_kernels.wait, status=self._status, timeout_ns=self._timeout_ns)
        self.run(wait, self._wire, lane, sequence + 1)
