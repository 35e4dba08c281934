"""A warm worker process: waits for jobs, runs each as one rank of a fresh gloo group, sends back what came of it."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import queue
import signal
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from moecomm.testing.failures import PackedError, pack_error

__all__ = ["Done", "Failed", "Finish", "Job", "worker_main"]


@dataclass(frozen=True)
class Job:
    """Be `rank` of `num_ranks` and run `call`, a pickled (function, arguments, warning filters)."""

    number: int
    rank: int
    num_ranks: int
    call: bytes
    store_port: int
    timeout: float
    path: list[str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Finish:
    """Every rank has reported: the group can be taken down."""


@dataclass(frozen=True)
class Done:
    """The rank returned `result` (pickled)."""

    result: bytes


@dataclass(frozen=True)
class Failed:
    """The rank raised, at this time of the host's monotonic clock."""

    error: PackedError
    at: float


def worker_main(jobs: Connection, stacks: Connection) -> None:
    """Serves jobs until the pipe closes, which it also does when the parent dies in whatever way."""
    faulthandler.enable(file=stacks.fileno(), all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno(), all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it then closes the pipe
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what has been imported stays; collecting after each job need not look at it
    inbox: queue.SimpleQueue[Job | Finish] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(jobs, inbox), name="jobs", daemon=True).start()
    jobs.send("ready")
    while True:
        job = inbox.get()
        assert isinstance(job, Job), job
        reply = _run(job)
        jobs.send_bytes(pickle.dumps(reply))
        if isinstance(reply, Failed):
            # At once, not when all have reported: peers that wait for this rank must learn that it is gone.
            _leave_group()
        finish = inbox.get()
        assert isinstance(finish, Finish), finish
        _leave_group()
        gc.collect()  # what the job left in cycles (an exception and its frames, say) must not outlive it
        jobs.send_bytes(pickle.dumps(Finish()))


def _receive(jobs: Connection, inbox: queue.SimpleQueue[Job | Finish]) -> None:
    while True:
        try:
            message = pickle.loads(jobs.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        inbox.put(message)


def _run(job: Job) -> Done | Failed:
    try:
        sys.path[:] = job.path
        _take_environment(job.environment)
        fn, args, filters = pickle.loads(job.call)
        group = _join_group(job)
        with warnings.catch_warnings():
            warnings.filters = filters
            return Done(pickle.dumps(fn(group, *args)))
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is reported to the caller of launch
        return Failed(pack_error(error), time.monotonic())


def _take_environment(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    # Workers of one host talk over the loopback device, also where the host name does not resolve.
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _join_group(job: Job) -> Any:
    import torch.distributed as dist

    from moecomm.groups import TorchGroup

    timeout = timedelta(seconds=job.timeout)
    store = dist.TCPStore("127.0.0.1", job.store_port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"job {job.number}", store),  # type: ignore[attr-defined]
        rank=job.rank,
        world_size=job.num_ranks,
        timeout=timeout,
    )
    assert dist.group.WORLD is not None
    return TorchGroup(dist.group.WORLD)


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
