"""Ranks as threads of this process, running freely or one at a time."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from moecomm.groups import LocalGroup, LocalHub
from moecomm.testing.launch import Outcome

__all__ = ["run_threads"]

_GRACE = 2.0  # seconds that overdue threads get to leave, once told that their peers are gone


def run_threads(
    fn: Callable[..., Any], num_ranks: int, args: tuple[Any, ...], timeout: float, *, stepped: bool
) -> Outcome:
    """Runs `fn(group, *args)` on one thread per rank; see `launch`."""
    groups = LocalHub(num_ranks, stepped=stepped).groups()
    outcome = Outcome()
    recording = threading.Lock()

    def rank_main(group: LocalGroup) -> None:
        error: BaseException | None = None
        group.enter()
        try:
            result = fn(group, *args)
            with recording:
                outcome.results[group.rank] = result
        except BaseException as caught:  # noqa: BLE001 - whatever it is, it is reported to the caller of launch
            error = caught
            with recording:
                outcome.failures[group.rank] = caught
                outcome.tracebacks[group.rank] = "".join(traceback.format_exception(caught))
        finally:
            group.leave(error)

    threads = [
        threading.Thread(target=rank_main, args=(group,), name=f"rank {group.rank}", daemon=True) for group in groups
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if not late:
        return outcome
    frames = sys._current_frames()
    stacks = {rank: _stack(frames.get(threads[rank].ident or 0)) for rank in late}
    with recording:
        # A copy: what the stragglers still do after the deadline no longer counts.
        report = Outcome(dict(outcome.results), dict(outcome.failures), dict(outcome.tracebacks), stacks)
    report.stacks = {rank: text for rank, text in stacks.items() if rank not in {*report.results, *report.failures}}
    for rank in late:
        with contextlib.suppress(Exception):
            groups[rank].leave(TimeoutError(f"rank {rank} did not finish within {timeout:g} s"))
    for rank in late:
        threads[rank].join(_GRACE / len(late))
    return report


def _stack(frame: Any) -> str:
    return "".join(traceback.format_stack(frame)) if frame is not None else ""
