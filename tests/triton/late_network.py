"""A network that keeps no promise it has not made: it stands in for NVSHMEM under interpreted kernels.

Between real processes: an address of mine is translated to the same place in a peer's memory. A put is cut into
pieces, each of which reads its source when it is delivered, at a random time and in random order; a signal is delivered
as soon as it may be, often before bytes that were put earlier. Whoever calls `quiet`, or a thread of the network if
nobody does, delivers what is under way.

A fence and a quiet are read as narrowly as one can: they are about what the program that calls them has put since its
kernel began, or what kernels before it have.
"""

import ctypes
import random
import threading
import time
from dataclasses import dataclass, field

import numpy as np
from triton._C.libtriton import interpreter as native
from triton.runtime.interpreter import interpreter_builder

_ADD = native.RMW_OP.ADD
_RELEASE = native.MEM_SEMANTIC.ACQUIRE_RELEASE


@dataclass(eq=False)
class _Op:
    """Something under way: pieces of a put, or n that is added to a counter."""

    program: int
    pe: int
    after: list = field(default_factory=list)  # what must be delivered before
    pieces: list = field(default_factory=list)  # (target, source, nbytes)
    signal: tuple = None  # (counter, n)

    @property
    def is_signal(self):
        return self.signal is not None


class LateNetwork:
    """The network of one rank; a context, within which kernels of this process are interpreted with it.

    Arguments:
        seed: of all choices.
        heaps: by PE the address here of each rank's heap.
        pe: mine.
        nbytes: of each heap.
        slowness: factor of all times.
    """

    def __init__(self, seed, heaps, pe, nbytes, slowness=1):
        self._random = random.Random(seed)
        self._heaps, self._mine, self._nbytes, self._slowness = heaps, heaps[pe], nbytes, slowness
        self._lock = threading.RLock()
        self._under_way, self._fenced = [], {}
        self._closed = threading.Event()
        self.calls = []

    def __enter__(self):
        from moecomm.kernels.triton.nvshmem_device import interpret_with

        interpret_with(self)
        self._thread = threading.Thread(target=self._trickle, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        from moecomm.kernels.triton.nvshmem_device import interpret_with

        interpret_with(None)
        self._closed.set()
        self._thread.join(10)
        with self._lock:
            while self._under_way:
                self._deliver_one(self._under_way)

    # -- what kernels call ---------------------------------------------------------------------------------------------

    def put(self, target, source, nbytes, pe):
        self._begin("put", pe, self._pieces(target, source, nbytes, pe))

    def put_signal(self, target, source, nbytes, counter, n, pe):
        with self._lock:
            op = self._begin("put_signal", pe, self._pieces(target, source, nbytes, pe))
            self._begin(None, pe, signal=(self._there(counter, 8, pe), n), after=[op])

    def signal(self, counter, n, pe):
        self._begin("signal", pe, signal=(self._there(counter, 8, pe), n))

    def fence(self):
        with self._lock:
            self.calls.append("fence")
            self._fenced[self._program()] = [op for op in self._under_way if op.program == self._program()]

    def quiet(self):
        time.sleep(self._some([0, 0, 0.002, 0.01]))  # what is slow is what a peer must not have missed
        with self._lock:
            self.calls.append("quiet")
            mine = [op for op in self._under_way if op.program == self._program()]
            while mine:
                self._deliver_one(mine)
                mine = [op for op in mine if op in self._under_way]

    def refresh(self, counter):
        assert self._mine <= counter < self._mine + self._nbytes
        self.calls.append("refresh")

    # -- what becomes of it --------------------------------------------------------------------------------------------

    def _some(self, seconds):
        return self._slowness * self._random.choice(seconds)

    @staticmethod
    def _program():
        return interpreter_builder.grid_idx

    def _there(self, address, nbytes, pe):
        offset = address - self._mine
        assert 0 <= offset <= self._nbytes - nbytes, f"[{offset}, {offset + nbytes}) is outside of the heap"
        return self._heaps[pe] + offset

    def _pieces(self, target, source, nbytes, pe):
        assert nbytes > 0, "a put of no bytes"
        assert self._mine <= source <= self._mine + self._nbytes - nbytes, "the source is outside of the heap"
        there = self._there(target, nbytes, pe)
        cuts = sorted({0, nbytes, *(self._random.randrange(nbytes) for _ in range(3))})
        return [(there + a, source + a, b - a) for a, b in zip(cuts, cuts[1:], strict=False)]

    def _begin(self, name, pe, pieces=(), *, signal=None, after=()):
        with self._lock:
            if name:
                self.calls.append(name)
            fenced = [op for op in self._fenced.get(self._program(), ()) if op.pe == pe]
            op = _Op(self._program(), pe, [*after, *fenced], list(pieces), signal)
            self._under_way.append(op)
            while self._random.random() < 0.5 and self._eager():
                self._deliver_one(self._eager())
            return op

    def _can_go(self, op):
        return not any(other in self._under_way for other in op.after)

    def _eager(self):
        """Signals that may be delivered: a network that means harm takes them first."""
        return [op for op in self._under_way if op.is_signal and self._can_go(op)]

    def _deliver_one(self, ops):
        """Delivers a signal or a piece of a put, of one of these operations or of what must come before it."""
        op = self._random.choice(ops)
        while not self._can_go(op):
            op = self._random.choice([other for other in op.after if other in self._under_way])
        if op.is_signal:
            counter, n = op.signal
            native.atomic_rmw(
                *(_ADD, np.array([counter], dtype=np.uint64), np.array([n], dtype=np.int64)),
                *(np.array([True]), _RELEASE),
            )
        else:
            target, source, nbytes = op.pieces.pop(self._random.randrange(len(op.pieces)))
            ctypes.memmove(target, source, nbytes)
        if not op.pieces:
            self._under_way.remove(op)

    def _trickle(self):
        while not self._closed.wait(self._some([0.0005, 0.002, 0.01])):
            with self._lock:
                if self._under_way:
                    self._deliver_one(self._eager() or self._under_way)
            time.sleep(0)
