"""Starts the ranks of a run, by itself or by mpirun, watches them, and brings home what they found."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moecomm
from moecomm.bench.config import BenchConfig
from moecomm.bench.mpi import mpirun
from moecomm.errors import MoecommError

__all__ = ["BenchFailed", "run_ranks"]

POLL_SECONDS = 0.05
# How long the other ranks may take to say what they saw after one has failed.
GRACE_SECONDS = 3.0
LOG_LINES = 30
# Becomes a program that the kernel ends when its parent ends (PR_SET_PDEATHSIG). Arguments: the parent's process id,
# the program, its arguments.
TIED = """import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent has ended")
os.execv(sys.argv[2], sys.argv[2:])"""


class BenchFailed(MoecommError):
    """A rank of the benchmark failed or the run did not end in time; the message says what went wrong."""


def run_ranks(
    config: BenchConfig, *, progress: Callable[[float, str], None] = lambda share, text: None
) -> list[dict[str, Any]]:
    """Run the benchmark's ranks and return what each left, by rank.

    All ranks are started by mpirun when `mpi` takes part, and as child processes otherwise.

    Arguments:
        config: the run.
        progress: called now and then with the share that is done, from 0 to 1, and a text.

    Raises:
        BenchFailed: a rank failed, or the run passed `config.timeout`.
        TransportUnavailable: `mpi` takes part and there is no mpirun or no mpi4py.
    """
    with tempfile.TemporaryDirectory(prefix="moecomm-bench-") as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(config.as_dict()))
        children = _start(config, directory)
        try:
            _watch(config, directory, children, progress)
        finally:
            _end(children)
        return [json.loads((directory / f"result-{rank}.json").read_text()) for rank in range(config.ranks)]


def _start(config: BenchConfig, directory: Path) -> list[subprocess.Popen[bytes]]:
    worker = [sys.executable, "-m", "moecomm.bench.worker", str(directory)]
    environment = _environment()
    if "mpi" in config.backends:
        start = [mpirun(), "-n", str(config.ranks), "--oversubscribe", "--bind-to", "none"]
        commands = [[*start, *worker]]
        if os.geteuid() == 0:
            environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    else:
        commands = [[*worker, str(rank)] for rank in range(config.ranks)]
    children = []
    for number, command in enumerate(commands):
        with (directory / f"log-{number}.txt").open("wb") as log:
            children.append(
                # A group of its own, so that an interrupt at the keyboard reaches the parent only, which ends them.
                subprocess.Popen(
                    [sys.executable, "-c", TIED, str(os.getpid()), *command],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    return children


def _environment() -> dict[str, str]:
    """The children's environment: this package importable, gloo on loopback."""
    environment = dict(os.environ)
    package_root = str(Path(moecomm.__file__).parent.parent)
    paths = [package_root, environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    # All ranks are on this host, and its name need not resolve.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _watch(
    config: BenchConfig,
    directory: Path,
    children: list[subprocess.Popen[bytes]],
    progress: Callable[[float, str], None],
) -> None:
    deadline = time.monotonic() + config.timeout
    failed_at: float | None = None
    while True:
        statuses = [child.poll() for child in children]
        now = time.monotonic()
        if all(status == 0 for status in statuses):
            break
        if any(status not in (None, 0) for status in statuses) or any(directory.glob("error-*.txt")):
            failed_at = failed_at or now
            if now - failed_at > GRACE_SECONDS or all(status is not None for status in statuses):
                raise BenchFailed(_failure(config, directory, statuses))
        if now > deadline:
            raise BenchFailed(
                f"the benchmark did not end within {config.timeout:g} s (raise it with --timeout).\n"
                + _failure(config, directory, statuses)
            )
        try:
            share, _, text = (directory / "progress.txt").read_text().partition(" ")
            progress(float(share), text)
        except FileNotFoundError:
            pass
        time.sleep(POLL_SECONDS)
    missing = [rank for rank in range(config.ranks) if not (directory / f"result-{rank}.json").exists()]
    if missing:
        raise BenchFailed(f"ranks {missing} ended without a result.\n" + _failure(config, directory, statuses))


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        for child in children:
            if child.poll() is None:
                os.killpg(child.pid, how)
        limit = time.monotonic() + GRACE_SECONDS
        for child in children:
            try:
                child.wait(timeout=max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
        if all(child.poll() is not None for child in children):
            return


def _failure(config: BenchConfig, directory: Path, statuses: list[int | None]) -> str:
    """Who failed and how: what a rank has left to say, mostly a traceback, else the end of what it printed."""
    parts = []
    explained: set[int] = set()
    seen: dict[str, int] = {}
    for rank in range(config.ranks):
        error = directory / f"error-{rank}.txt"
        if error.exists():
            explained.add(rank)
            text = error.read_text().rstrip()
            # Ranks mostly fail alike; addresses differ.
            shape = re.sub(r"0x[0-9a-f]+", "", text)
            said = f" like rank {seen[shape]}" if shape in seen else f":\n{text}"
            seen.setdefault(shape, rank)
            parts.append(f"rank {rank} of the benchmark failed{said}")
    is_mpi = "mpi" in config.backends
    for number, status in enumerate(statuses):
        log = (directory / f"log-{number}.txt").read_text(errors="replace").splitlines()[-LOG_LINES:]
        if status == 0 or (not log and (explained if is_mpi else number in explained)):
            continue
        who = "mpirun" if is_mpi else f"rank {number}"
        ended = "is still running" if status is None else f"ended with status {status}"
        parts.append("\n".join([f"{who} {ended}" + ("; the end of its output:" if log else ", silent"), *log]))
    return "\n".join(parts)
