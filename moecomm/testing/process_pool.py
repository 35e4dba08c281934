"""A pool of warm worker processes: started once, torch imported, replaced when they die or overrun.

parent -- Job ----------------> worker of rank r    one message each way per step; a process that ends is seen by its
       <- Done or Failed ------                     sentinel; all ranks have reported, died or are overdue before
       -- Finish ------------->                     Finish, so no rank's group vanishes while others still use it
       <- Finish --------------
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from moecomm.testing.failures import RankDied
from moecomm.testing.launch import Outcome
from moecomm.testing.process_worker import Done, Failed, Finish, Job, worker_main

__all__ = ["ProcessPool", "shared_pool"]

_START_TIMEOUT = 120.0  # importing torch on a cold, busy machine
_FINISH_TIMEOUT = 5.0
_STACK_TIMEOUT = 1.0


@functools.cache
def shared_pool() -> ProcessPool:
    """The pool of this process, made on first use and closed at exit."""
    pool = ProcessPool()
    atexit.register(pool.close)
    return pool


class Worker:
    """One worker process and the pipes to it."""

    def __init__(self) -> None:
        # A fork server that has torch imported makes a worker in milliseconds; elsewhere each imports it itself.
        method = "forkserver" if sys.platform == "linux" else "spawn"
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(["torch", "torch.distributed", "moecomm.testing.process_worker"])
        self.jobs, jobs_of_worker = context.Pipe()
        self.stacks, stacks_of_worker = context.Pipe(duplex=False)
        self.process = context.Process(target=worker_main, args=(jobs_of_worker, stacks_of_worker), daemon=True)
        self.process.start()
        jobs_of_worker.close()
        stacks_of_worker.close()
        self.ready = False

    def await_ready(self) -> None:
        """Waits until the worker has imported what it needs; RuntimeError if it does not come up."""
        if self.ready:
            return
        try:
            self.ready = self.jobs.poll(_START_TIMEOUT) and self.jobs.recv() == "ready"
        except EOFError:
            self.process.join(_FINISH_TIMEOUT)
        if not self.ready:
            raise RuntimeError(
                f"a worker process did not start (exit code {self.process.exitcode}): it could not import moecomm or "
                "the main script, and has said why on stderr. A script that calls launch must do so under "
                '`if __name__ == "__main__":`'
            )

    def send(self, message: Job | Finish) -> None:
        """Sends a message; a worker that is gone is noticed by whoever waits for the answer."""
        try:
            self.jobs.send_bytes(pickle.dumps(message))
        except OSError:
            return

    def stack(self) -> str:
        """Asks the worker where it is."""
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
        return self._written(_STACK_TIMEOUT)

    def death(self) -> RankDied:
        """How the process ended, and what it wrote in doing so."""
        self.process.join(_FINISH_TIMEOUT)
        return RankDied(self.process.exitcode, self._written(0.0))

    def _written(self, timeout: float) -> str:
        chunks: list[bytes] = []
        while self.stacks.poll(timeout):
            chunk = os.read(self.stacks.fileno(), 1 << 16)
            if not chunk:
                break
            chunks.append(chunk)
            timeout = 0.05
        return b"".join(chunks).decode(errors="replace")

    def close(self, *, kill: bool = False) -> None:
        """Ends the process: by closing its pipe, or at once."""
        if kill and self.process.is_alive():
            self.process.kill()
        self.jobs.close()
        self.process.join(_FINISH_TIMEOUT)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(_FINISH_TIMEOUT)
        self.stacks.close()
        self.process.close()


class ProcessPool:
    """Warm workers; `run` takes as many as it needs, growing the pool."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._running = threading.Lock()
        self._num_jobs = 0
        self._store: Any = None
        self._pid = os.getpid()

    def run(self, fn: Callable[..., Any], num_ranks: int, args: tuple[Any, ...], timeout: float) -> Outcome:
        """Runs `fn(group, *args)` on one worker per rank; see `launch`. One job at a time."""
        call = pickle.dumps((fn, args, list(warnings.filters)))
        with self._running:
            while len(self._workers) < num_ranks:
                self._workers.append(Worker())
            workers = self._workers[:num_ranks]
            try:
                for worker in workers:
                    worker.await_ready()
            except RuntimeError:
                self._end_workers()  # none of them may be left behind half started
                raise
            self._num_jobs += 1
            port = self._store_port()
            for rank, worker in enumerate(workers):
                worker.send(Job(self._num_jobs, rank, num_ranks, call, port, timeout, list(sys.path), dict(os.environ)))
            outcome = _collect(workers, timeout)
            self._finish(workers, outcome)
            return outcome

    def close(self) -> None:
        """Ends all workers. Idempotent; in a forked child it does nothing, the workers are not its own."""
        if os.getpid() != self._pid:
            return
        self._end_workers()
        self._store = None

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = []

    def _store_port(self) -> int:
        if self._store is None:
            import torch.distributed as dist

            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        port: int = self._store.port
        return port

    def _finish(self, workers: list[Worker], outcome: Outcome) -> None:
        reported = [w for r, w in enumerate(workers) if not isinstance(outcome.failures.get(r), RankDied)]
        reported = [worker for worker in reported if workers.index(worker) not in outcome.stacks]
        for worker in reported:
            worker.send(Finish())
        deadline = time.monotonic() + _FINISH_TIMEOUT
        for worker in workers:
            if worker in reported and _finished(worker, deadline):
                continue
            # Dead, overdue, or stuck in taking its group down.
            worker.close(kill=True)
            self._workers[self._workers.index(worker)] = Worker()


def _collect(workers: list[Worker], timeout: float) -> Outcome:
    outcome = Outcome()
    failed_at: dict[int, float] = {}
    rank_of: dict[Any, int] = {}
    for rank, worker in enumerate(workers):
        rank_of[worker.jobs] = rank_of[worker.process.sentinel] = rank
    deadline = time.monotonic() + timeout
    while rank_of:
        signalled = wait(list(rank_of), max(0.0, deadline - time.monotonic()))
        if not signalled:
            break
        for rank in sorted({rank_of[one] for one in signalled}):
            worker = workers[rank]
            failed_at[rank] = _take_report(rank, worker, outcome)
            del rank_of[worker.jobs], rank_of[worker.process.sentinel]
    # Reports may overtake each other, and a death may be seen after its consequences.
    in_order = sorted(outcome.failures, key=lambda rank: failed_at[rank])
    outcome.failures = {rank: outcome.failures[rank] for rank in in_order}
    outcome.stacks = {rank: workers[rank].stack() for rank in sorted(set(rank_of.values()))}
    return outcome


def _take_report(rank: int, worker: Worker, outcome: Outcome) -> float:
    """Notes what became of a rank; returns when it failed (0.0: it died, which goes before all else)."""
    # The pipe first: a worker that reported and died afterwards has still reported.
    try:
        reply = pickle.loads(worker.jobs.recv_bytes()) if worker.jobs.poll() else None
    except (EOFError, OSError):
        reply = None
    if isinstance(reply, Done):
        try:
            outcome.results[rank] = pickle.loads(reply.result)
        except Exception as error:  # noqa: BLE001 - a result that cannot be unpickled is the rank's failure
            outcome.failures[rank] = error
    elif isinstance(reply, Failed):
        try:
            outcome.failures[rank] = reply.error.unpack()
        except Exception as error:  # noqa: BLE001 - its class cannot be imported here
            outcome.failures[rank] = error
        outcome.tracebacks[rank] = reply.error.text
        return reply.at
    else:
        outcome.failures[rank] = worker.death()
        return 0.0
    return time.monotonic()


def _finished(worker: Worker, deadline: float) -> bool:
    connection: Connection = worker.jobs
    try:
        return connection.poll(max(0.0, deadline - time.monotonic())) and isinstance(
            pickle.loads(connection.recv_bytes()), Finish
        )
    except (EOFError, OSError):
        return False
