"""A device that stands in for a GPU: CPU tensors, interpreted kernels, and streams that do their work late.

Each stream is a thread that takes its time before every piece of work, so what is not put in order by events and
signals happens in the wrong order. The stream of a thread that asks for none is the thread itself: there work is done
at once, and waiting for an event blocks, so that plain torch code sees finished results.
"""

import contextlib
import pickle
import queue
import threading
import time

import numpy as np
import torch

from moecomm import _C
from moecomm.devices.base import AsynchronousDevice, DeviceIdentity, DeviceMemory, Event, Stream
from moecomm.devices.device_queue import NUM_SLOTS, DeviceQueue
from moecomm.devices.wire_queue import WireQueue
from moecomm.kernels.registry import (
    captured_kernels_for,
    eager_kernels_for,
    kernels_for,
    signal_kernels_for,
    wire_kernels_for,
)

_PATIENCE = 30.0
_interpreter = threading.RLock()  # the interpreter runs one kernel at a time in a process


class LateEvent(Event):
    def __init__(self):
        self.flag = threading.Event()

    def has_passed(self):
        return self.flag.is_set()

    def block(self):
        assert self.flag.wait(_PATIENCE), "an event has not passed in time"


class LateStream(Stream):
    """Does its work in a thread of its own, `delay` seconds late each."""

    def __init__(self, failures, delay=0.0):
        self.delay = delay
        self._failures = failures
        self._work = queue.SimpleQueue()
        threading.Thread(target=self._main, daemon=True).start()

    def _main(self):
        while (work := self._work.get()) is not None:
            time.sleep(self.delay)
            try:
                work()
            except Exception as error:  # noqa: BLE001 - kept for the test to see
                self._failures.append(error)
            del work

    def submit(self, work):
        self._work.put(work)

    def record(self):
        event = LateEvent()
        self._work.put(event.flag.set)
        return event

    def wait(self, event):
        self._work.put(event.block)

    def synchronize(self):
        self.record().block()

    def is_same(self, other):
        return self is other

    def end(self):
        self._work.put(None)


class PromptStream(Stream):
    """The calling thread itself."""

    def submit(self, work):
        work()

    def record(self):
        event = LateEvent()
        event.flag.set()
        return event

    def wait(self, event):
        event.block()

    def synchronize(self):
        """All is done."""

    def is_same(self, other):
        return isinstance(other, PromptStream)


class _Locked:
    """An object whose methods are called one at a time."""

    def __init__(self, kernels):
        self._kernels = kernels

    def __getattr__(self, name):
        method = getattr(self._kernels, name)
        if not callable(method):
            return method

        def locked(*args, **options):
            with _interpreter:
                return method(*args, **options)

        return locked


class LateSignals(_Locked):
    """Signal kernels; a wait looks again and again, so that other kernels of the process can run in between."""

    def wait(self, board, slot, at_least, *, status, timeout_ns, **options):  # `board` is a wire with those of a wire
        kernels = self._kernels
        deadline = time.monotonic_ns() + timeout_ns
        while True:
            is_last = time.monotonic_ns() > deadline or status[0] != 0
            look = status if is_last else torch.zeros_like(status)
            with _interpreter:
                kernels.wait(board, slot, at_least, status=look, timeout_ns=0, **options)
            if is_last or look[0] == 0:
                return
            time.sleep(5e-4)


class LateCaptured(_Locked):
    """Captured calls; their waits look again and again first, so that other kernels of the process can run."""

    def __init__(self, kernels):
        super().__init__(kernels)
        self._timeout_ns = kernels.control.timeout_ns
        kernels.control = kernels.control._replace(timeout_ns=0)  # what is not there by then does not come

    def receive(self, block):
        self._look(self._kernels._dispatch.slot, block.dispatched)
        with _interpreter:
            self._kernels.receive(block)

    def sum_rows(self, placed, out, **options):
        self._look(self._kernels._combine.slot, placed.combined)
        with _interpreter:
            self._kernels.sum_rows(placed, out, **options)

    def _look(self, slot, ticket):
        self.look(self._kernels.control, slot, ticket)

    def look(self, control, slot, ticket):
        """Waits until all have come so far, or no longer."""
        lanes = np.asarray(_Interface(control.board, 8 * control.num_ranks * (slot + 1), None)).view(np.int64)
        deadline = time.monotonic_ns() + self._timeout_ns
        while (lanes[slot * control.num_ranks :] < ticket.item()).any() and control.status[0] == 0:
            if time.monotonic_ns() > deadline:
                return
            time.sleep(5e-4)


class LateStatic(_Locked):
    """Calls of fixed shape; as `LateCaptured`, whose kernels these go with."""

    def __init__(self, kernels, calls):
        super().__init__(kernels)
        self._calls = calls

    def push(self, block):
        self._look("announcements", block.announced)
        with _interpreter:
            self._kernels.push(block)

    def arrive(self, block):
        self._look("pushes", block.pushed)
        with _interpreter:
            self._kernels.arrive(block)

    def sum_rows(self, answered, out, **options):
        self._look("readiness", answered.combined)
        with _interpreter:
            self._kernels.sum_rows(answered, out, **options)

    def release(self, answered):
        self._look("releases", answered.released)
        with _interpreter:
            self._kernels.release(answered)

    def _look(self, operation, ticket):
        exchange = self._calls._kernels
        self._calls.look(exchange.control, getattr(exchange, operation).slot, ticket)


class LateCapturedKernels:
    """Makes captured calls.

    Arguments:
        looks: waits are as in `LateCaptured`; not so where a rank has a process of its own, and launches are replayed.
    """

    def __init__(self, looks):
        self._looks = looks
        self._kernels = captured_kernels_for("triton")
        self.memory = self._kernels.memory
        self.mailbox_bytes = self._kernels.mailbox_bytes

    def make(self, *args, **options):
        with _interpreter:
            made = self._kernels.make(*args, **options)
        return LateCaptured(made) if self._looks else _Locked(made)

    def make_static(self, calls, **places):
        with _interpreter:
            made = self._kernels.make_static(calls._kernels, **places)
        return LateStatic(made, calls) if self._looks else _Locked(made)


class LateMemory(DeviceMemory):
    def __init__(self, mapping):
        self.mapping, self.address, self.nbytes = mapping, mapping.address, mapping.nbytes


class _Interface:
    def __init__(self, address, nbytes, owner):
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        self._owner = owner


class LateDevice(AsynchronousDevice):
    """One GPU's stand-in for one rank; those of several ranks are one GPU.

    Arguments:
        delay: of the communicator's stream, in seconds before each piece of work.
        queue_class: of the communicator's queue; None: the one that the product takes.
        identity: what peers are told.
        wire_kernels: None: the product's.
        looks: see `LateCapturedKernels`.
    """

    kind = "cuda"
    torch_device = torch.device("cpu")

    def __init__(self, delay=0.0, queue_class=None, identity=None, wire_kernels=None, looks=True):
        self.failures = []
        self.events = 0
        self._delay = delay
        self._queue_class = queue_class
        self._identity = identity or DeviceIdentity("late", ("late",))
        self._current = threading.local()
        self._prompt = PromptStream()
        self._streams = []
        self._signals = LateSignals(signal_kernels_for("triton"))
        self._wire = LateSignals(wire_kernels or wire_kernels_for("triton"))
        self._rows = _Locked(kernels_for("triton"))
        self._eager = _Locked(eager_kernels_for("triton"))
        self._captured = LateCapturedKernels(looks)
        self.captures = False

    def row_kernels(self):
        return self._rows

    def eager_kernels(self):
        return self._eager

    def captured_kernels(self):
        return self._captured

    def is_capturing(self):
        return self.captures

    def signal_kernels(self):
        return self._signals

    def wire_kernels(self):
        return self._wire

    def identity(self):
        return self._identity

    def default_memory_limit(self, num_sharers):
        return (1 << 22) // num_sharers

    def board_bytes(self, num_ranks):
        return self._signals.board_bytes(num_ranks, NUM_SLOTS)

    def make_queue(self, boards, rank, timeout, gone, wire=None):
        if wire is None:
            return (self._queue_class or DeviceQueue)(self, boards, rank, timeout, gone)
        return (self._queue_class or WireQueue)(self, boards, rank, timeout, gone, wire)

    def allocate(self, nbytes, *, is_exported):
        make = _C.Mapping.create_shared if is_exported else lambda _, size: _C.Mapping.create_private(size)
        memory = LateMemory(make("moecomm", max(1, nbytes)))
        if nbytes > 4096:  # not the boards: what is read before it is written shows
            self.bytes_at(memory.address, nbytes, None).fill_(0xFF)
        return memory

    def export(self, memory):
        import os

        return pickle.dumps((os.getpid(), memory.mapping.fd, memory.nbytes))

    def open(self, handle, nbytes):
        return LateMemory(_C.Mapping.open_peer(*pickle.loads(handle)))

    def bytes_at(self, address, nbytes, owner):
        return torch.from_numpy(np.asarray(_Interface(address, nbytes, owner)))

    def pinned(self, tensor):
        return tensor.clone()

    def current_stream(self):
        return getattr(self._current, "stream", self._prompt)

    def new_stream(self, delay=None):
        # The first is the queue's own, the second the one that must not stand behind a wait.
        stream = LateStream(self.failures, (self._delay if not self._streams else 0.0) if delay is None else delay)
        self._streams.append(stream)
        return stream

    @contextlib.contextmanager
    def using(self, stream):
        """Makes a stream the calling thread's."""
        self._current.stream = stream
        try:
            yield stream
        finally:
            del self._current.stream

    @contextlib.contextmanager
    def capturing(self):
        """As if the current stream's work were kept for a graph; whoever keeps it sees all of it."""
        self.captures = True
        try:
            yield
            for stream in self._streams:
                stream.synchronize()
        finally:
            self.captures = False

    def end(self):
        """Ends the streams' threads, and says what went wrong in them."""
        for stream in self._streams:
            stream.end()
        assert not self.failures, self.failures
