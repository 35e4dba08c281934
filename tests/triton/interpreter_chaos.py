"""Interpreted kernels of several ranks in one process, with memory as unkind as a GPU's may be.

The interpreter runs the programs of a grid one after the other, and every store is there at once. Here all programs of
all ranks that could run at a time do so in turns, which change at every access to memory, and what a program stores
lies in wait: in pieces, each of which comes to memory at a random time, in random order, perhaps never before the end.
What another program must see of it is what the memory model of GPUs says:

- A release hands on the stores of its program that a block barrier has ordered before it, and what the program has been
  handed itself. It does not bring them to memory.
- An acquire that reads from a release (or from additions on top of it) is handed that, if the scopes of both include
  the other: `sys`, or the same rank. It counts for the program's loads behind the next block barrier.
- A kernel sees what the kernels before it on its rank have stored or been handed.
- Whatever else a program loads may be there or not. Stores to one place keep the order in which one sees the other.

Loads happen when they are issued: a release that overtakes loads of other threads goes unnoticed here and is looked for
in the compiled code.

All choices follow from a seed. Each rank is a function that launches kernels as usual. Memory that more than one rank
reaches must be named and outlive `run`; ranks look at it with `read` and change it with `write`. All other memory is of
one rank, which finds there what a kernel has stored when the kernel has ended.
"""

import contextlib
import ctypes
import inspect
import random
import threading
from dataclasses import dataclass

import numpy as np
import torch
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, TensorHandle, interpreter_builder

from moecomm.kernels.triton import lanes

_MOST_PENDING = 300


class Stuck(Exception):
    """The ranks have taken more steps than were granted."""


class _Stop(BaseException):
    """Ends a task because another has failed."""


@dataclass
class _View:
    """Sets of stores, as bits: what a program's loads see, what its releases hand on, what a barrier will add."""

    seen: int = 0
    ordered: int = 0
    gained: int = 0

    def fence(self):
        self.seen = self.ordered = self.seen | self.gained
        self.gained = 0


@dataclass
class _Store:
    bit: int
    address: int
    data: bytes
    before: int

    def overlaps(self, begin, end):
        return self.address < end and begin < self.address + len(self.data)


class _Task:
    """A rank or one program of a kernel, as a thread that runs only when it has the turn."""

    def __init__(self, rank, view, body, place=None, parent=None):
        self.rank, self.view, self.body, self.place, self.parent = rank, view, body, place, parent
        self.turn = threading.Semaphore(0)
        self.weight = 1.0
        self.num_children = 0


class Chaos:
    """One run. `run` may be called once.

    Arguments:
        seed: of all choices.
        shared: tensors that more than one rank reaches.
        max_steps: accesses to memory by all ranks together, before `Stuck` is raised.
    """

    def __init__(self, seed, shared=(), max_steps=60_000):
        self._random = random.Random(seed)
        self._shared = [(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.itemsize) for tensor in shared]
        self._steps_left = max_steps
        self._stays = self._random.choice([0.0, 0.5, 0.9])  # how readily a task keeps its turn
        self._arrives = self._random.choice([0.0, 0.01, 0.3])  # how readily a store comes to memory by itself
        self._tasks, self._current, self._failure = [], None, None
        self._finished = threading.Event()
        self._pending = {}  # bit: store, in the order in which they were made
        self._next_bit = 1
        self._handed = {}  # address of a counter: {(is_sys, rank): stores}
        self._now = 0

    def run(self, *ranks):
        """Calls the functions, one per rank; returns their results, or raises what the first that failed raised."""
        results = [None] * len(ranks)

        def rank_body(rank):
            def body():
                results[rank] = ranks[rank]()

            return body

        with contextlib.ExitStack() as undo:
            self._patch(undo)
            for rank in range(len(ranks)):
                self._add(_Task(rank, _View(), rank_body(rank)))
            self._give_turn(self._pick(None))
            self._finished.wait()
        if self._failure is not None:
            raise self._failure
        for store in list(self._pending.values()):
            if store.bit in self._pending:
                self._apply(store)
        return results

    def read(self, tensor):
        """A copy of a tensor as the calling rank sees it behind the kernels that it has launched."""
        self._switch()
        with self._shown(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.itemsize):
            return tensor.clone()

    def write(self, tensor, value):
        """Fills a contiguous tensor, in the order of the calling rank's kernels."""
        filled = torch.full_like(tensor, value).reshape(-1).view(torch.uint8).numpy().tobytes()
        self._put(tensor.data_ptr(), filled)
        self._current.view.fence()

    # -- turns ---------------------------------------------------------------------------------------------------------

    def _add(self, task):
        self._tasks.append(task)
        threading.Thread(target=self._main, args=(task,), daemon=True).start()

    def _main(self, task):
        task.turn.acquire()
        try:
            self._resume(task)
            task.body()
        except _Stop:
            pass
        except BaseException as error:  # noqa: BLE001 - whatever it is, `run` raises it
            self._failure = self._failure or error
        self._tasks.remove(task)
        if task.parent is not None:
            task.parent.num_children -= 1
        if self._tasks:
            self._give_turn(self._pick(None))
        else:
            self._finished.set()

    def _pick(self, current):
        can_run = [task for task in self._tasks if not task.num_children]
        if current in can_run and self._random.random() < self._stays:
            return current
        if self._random.random() < 0.02:  # someone becomes slow, or is in a hurry
            self._random.choice(can_run).weight = self._random.choice([0.02, 0.2, 1.0, 5.0])
        return self._random.choices(can_run, [task.weight for task in can_run])[0]

    def _give_turn(self, task):
        self._current = task
        task.turn.release()

    def _resume(self, task):
        if task.place is not None:
            interpreter_builder.grid_idx, interpreter_builder.grid_dim = task.place
        if self._failure is not None:
            raise _Stop

    def _switch(self):
        """Here a store may come to memory, and another task may get the turn."""
        self._steps_left -= 1
        if self._steps_left < 0:
            raise Stuck(f"{len(self._tasks)} tasks have not come to their end")
        pending = list(self._pending.values())
        if pending and self._random.random() < self._arrives:
            self._apply(self._random.choice(pending))
        elif len(pending) > _MOST_PENDING:
            self._apply(self._random.choice(pending[: _MOST_PENDING // 2]))
        task = self._current
        chosen = self._pick(task)
        if chosen is not task:
            self._give_turn(chosen)
            task.turn.acquire()
        self._resume(task)

    def _clock(self):
        """Nanoseconds; time passes by being looked at. Who looks is waiting, so the others get more turns."""
        self._current.weight = max(0.01, self._current.weight / 4)
        self._switch()
        self._now += 1000
        return self._now

    def _launch(self, executor, args, kwargs):
        task = self._current
        names = inspect.getfullargspec(executor.fn)
        kwargs = {name: value for name, value in kwargs.items() if name in names.args or name in names.kwonlyargs}
        bound = inspect.getcallargs(executor.fn, *args, **kwargs)
        convert = interpreter._implicit_cvt
        bound = {name: arg if name in executor.constexprs else convert(arg) for name, arg in bound.items()}
        grid = executor.grid(bound) if callable(executor.grid) else executor.grid
        grid = (*grid, 1, 1)[:3]
        self._scopes.append(interpreter._patch_lang(executor.fn))
        start = task.view
        programs = [
            _Task(task.rank, _View(start.seen, start.ordered), lambda: executor.fn(**bound), (place, grid), task)
            for place in np.ndindex(*grid)
        ]
        task.num_children = len(programs)
        for program in programs:
            self._add(program)
        while task.num_children:
            self._switch()
        for program in programs:
            start.gained |= program.view.seen | program.view.gained
        start.fence()
        for store in list(self._pending.values()):
            is_known = store.bit & start.seen and store.bit in self._pending
            if is_known and not any(store.overlaps(*memory) for memory in self._shared):
                self._apply(store)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _patch(self, undo):
        self._scopes = []

        def patch(owner, name, value):
            is_own = name in vars(owner)
            undo.callback(setattr if is_own else delattr, owner, name, *([vars(owner)[name]] if is_own else []))
            setattr(owner, name, value)

        undo.callback(lambda: [scope.restore() for scope in reversed(self._scopes)])
        patch(GridExecutor, "__call__", lambda executor, *args, **kwargs: self._launch(executor, args, kwargs))
        patch(lanes, "nanoseconds", self._clock)
        self._plain_load = interpreter_builder.create_masked_load
        self._plain_rmw = interpreter_builder.create_atomic_rmw
        self._plain_cas = interpreter_builder.create_atomic_cas
        patch(interpreter_builder, "create_masked_load", self._load)
        patch(interpreter_builder, "create_masked_store", self._store)
        patch(interpreter_builder, "create_atomic_rmw", self._rmw)
        patch(interpreter_builder, "create_atomic_cas", self._cas)
        patch(interpreter_builder, "create_barrier", self._barrier)

    @contextlib.contextmanager
    def _shown(self, begin, end):
        """Memory as the current task sees it: with pending stores that it knows of."""
        hidden = []
        for store in self._pending.values():
            if store.bit & self._current.view.seen and store.overlaps(begin, end):
                hidden.append((store.address, ctypes.string_at(store.address, len(store.data))))
                ctypes.memmove(store.address, store.data, len(store.data))
        try:
            yield
        finally:
            for address, data in reversed(hidden):
                ctypes.memmove(address, data, len(data))

    def _apply(self, store):
        """Brings a store to memory, behind those to the same place that it comes after."""
        begin, end = store.address, store.address + len(store.data)
        for earlier in list(self._pending.values()):
            if earlier.bit & store.before and earlier.overlaps(begin, end) and earlier.bit in self._pending:
                self._apply(earlier)
        del self._pending[store.bit]
        ctypes.memmove(store.address, store.data, len(store.data))
        for address in [address for address in self._handed if begin <= address < end]:
            del self._handed[address]

    def _put(self, address, data):
        view = self._current.view
        self._pending[self._next_bit] = _Store(self._next_bit, address, data, view.seen)
        view.seen |= self._next_bit
        self._next_bit <<= 1

    def _load(self, ptrs, mask, *rest):
        self._switch()
        wanted = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]
        if not wanted.size:
            return self._plain_load(ptrs, mask, *rest)
        with self._shown(int(wanted.min()), int(wanted.max()) + 8):
            return self._plain_load(ptrs, mask, *rest)

    def _store(self, ptrs, value, mask, *rest):
        self._switch()
        is_stored = np.broadcast_to(mask.data, ptrs.data.shape)
        values = np.ascontiguousarray(np.broadcast_to(value.data, ptrs.data.shape)[is_stored])
        addresses, size = ptrs.data[is_stored], values.itemsize
        order = np.argsort(addresses, kind="stable")
        addresses, values = addresses[order], values[order]
        jumps = np.flatnonzero(np.diff(addresses) != size) + 1
        cuts = [cut for cut in range(1, len(addresses)) if self._random.random() < 0.1]
        bounds = [0, *sorted({*jumps.tolist(), *cuts}), len(addresses)]
        for begin, end in zip(bounds, bounds[1:], strict=False):
            if begin < end:
                self._put(int(addresses[begin]), values[begin:end].tobytes())

    def _rmw(self, op, ptr, value, mask, sem, scope):
        return self._atomic(
            lambda at: self._plain_rmw(op, at(ptr), at(value), at(mask), sem, scope), ptr, value, mask.data, sem, scope
        )

    def _cas(self, ptr, expected, value, sem, scope):
        return self._atomic(
            lambda at: self._plain_cas(at(ptr), at(expected), at(value), sem, scope), ptr, value, True, sem, scope
        )

    def _atomic(self, carry_out, ptr, value, is_done, sem, scope):
        shape = ptr.data.shape
        result = np.zeros(shape, dtype=value.data.dtype)
        is_done = np.broadcast_to(is_done, shape)
        places = [place for place in np.ndindex(shape) if is_done[place]]
        self._random.shuffle(places)
        for place in places:
            self._switch()
            address = int(ptr.data[place])
            for store in list(self._pending.values()):
                known = store.bit & self._current.view.seen and store.bit in self._pending
                if known and store.overlaps(address, address + result.itemsize):
                    self._apply(store)
            one = carry_out(lambda handle, place=place: self._element(handle, shape, place))
            result[place] = one.data.reshape(-1)[0]
            self._synchronise(address, sem.name, scope.name == "SYSTEM")
        return TensorHandle(result, value.dtype.scalar)

    @staticmethod
    def _element(handle, shape, place):
        return TensorHandle(np.broadcast_to(handle.data, shape)[place].reshape(1), handle.dtype)

    def _synchronise(self, address, sem, is_sys):
        view, rank = self._current.view, self._current.rank
        handed = self._handed.setdefault(address, {})
        if sem in ("ACQUIRE", "ACQUIRE_RELEASE"):
            for (was_sys, source), stores in handed.items():
                if source == rank or (was_sys and is_sys):
                    view.gained |= stores
        if sem in ("RELEASE", "ACQUIRE_RELEASE"):
            handed[is_sys, rank] = handed.get((is_sys, rank), 0) | view.ordered

    def _barrier(self):
        self._switch()
        self._current.view.fence()
