"""Runs one function on every rank of a small group, with a deadline, and says which rank failed and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moecomm.testing.failures import DeadlineExceeded, RankFailure

__all__ = ["BACKENDS", "Outcome", "launch"]

BACKENDS = ("processes", "stepped", "threads")


@dataclass
class Outcome:
    """What became of one launch: every rank is in `results`, `failures` or `stacks`.

    `failures` and `tracebacks` are in the order in which the ranks failed; `stacks` holds the ranks that were still
    running at the deadline, and where they were.
    """

    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, BaseException] = field(default_factory=dict)
    tracebacks: dict[int, str] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)


def launch(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    backend: str = "threads",
    timeout: float = 30.0,
    return_exceptions: bool = False,
) -> list[Any]:
    """Calls `fn(group, *args)` on `num_ranks` ranks and returns the results by rank.

    Arguments:
        fn: for "processes" a function at the top level of a module, which the workers import.
        num_ranks: 1 or more.
        args: given to every rank alike; for "processes" they are pickled.
        backend: "threads" (one thread per rank), "stepped" (the same, but one rank runs at a time and the turn passes
            at waits: a deterministic order) or "processes" (warm worker processes; the group is a `TorchGroup` over
            gloo, also the default group of `torch.distributed` during the call).
        timeout: seconds for the whole call; starting the first workers does not count.
        return_exceptions: return what a rank raised in its place of the list, `RankDied` for a rank whose process
            ended, `DeadlineExceeded` for a rank that did not finish, instead of raising.

    Raises:
        RankFailure: a rank raised, or its process died.
        DeadlineExceeded: ranks were still running at the deadline. Worker processes are killed and replaced; threads
            cannot be killed, they are told that their peers are gone and left alone.
        ValueError: `backend` is unknown or `num_ranks` < 1.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {list(BACKENDS)}, got {backend!r}")
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    if backend == "processes":
        from moecomm.testing.process_pool import shared_pool

        outcome = shared_pool().run(fn, num_ranks, args, timeout)
    else:
        from moecomm.testing.thread_ranks import run_threads

        outcome = run_threads(fn, num_ranks, args, timeout, stepped=backend == "stepped")
    return _results(outcome, num_ranks, timeout, return_exceptions)


def _results(outcome: Outcome, num_ranks: int, timeout: float, return_exceptions: bool) -> list[Any]:
    late = tuple(sorted(outcome.stacks))
    overdue = DeadlineExceeded(late, timeout, outcome.stacks, outcome.failures) if late else None
    if return_exceptions:
        known = {**{rank: overdue for rank in late}, **outcome.failures, **outcome.results}
        return [known[rank] for rank in range(num_ranks)]
    if overdue is not None:
        raise overdue from next(iter(outcome.failures.values()), None)
    if outcome.failures:
        raise RankFailure(outcome.failures, outcome.tracebacks) from next(iter(outcome.failures.values()))
    return [outcome.results[rank] for rank in range(num_ranks)]
