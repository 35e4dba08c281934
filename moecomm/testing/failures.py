"""How a launched function can end badly, and how an exception travels between processes."""

from __future__ import annotations

import pickle
import signal
import traceback
from dataclasses import dataclass
from typing import Any

from moecomm.errors import MoecommError

__all__ = ["DeadlineExceeded", "PackedError", "RankDied", "RankFailure", "pack_error"]


class RankDied(MoecommError):
    """The process of a rank ended before it returned.

    Arguments:
        exitcode: as `multiprocessing` gives it: the exit status, or minus the number of the signal.
        report: what the process wrote while crashing (the native crash report), or an empty string.
    """

    def __init__(self, exitcode: int | None, report: str = "") -> None:
        super().__init__(f"the process {_describe_exit(exitcode)}" + (f"\n{report}" if report else ""))
        self.exitcode = exitcode
        self.report = report


class DeadlineExceeded(MoecommError):
    """Some ranks did not finish in time.

    Arguments:
        ranks: the ranks that did not finish.
        timeout: the limit in seconds.
        stacks: for each of those ranks, where it was.
        failures: what happened to the ranks that had failed before.
    """

    def __init__(
        self, ranks: tuple[int, ...], timeout: float, stacks: dict[int, str], failures: dict[int, BaseException]
    ) -> None:
        lines = [f"ranks {list(ranks)} did not finish within {timeout:g} s"]
        lines += [f"rank {rank} had failed before: {_one_line(error)}" for rank, error in sorted(failures.items())]
        lines += [f"--- rank {rank} was here:\n{stacks[rank].rstrip()}" for rank in ranks if stacks.get(rank)]
        super().__init__("\n".join(lines))
        self.ranks = ranks
        self.timeout = timeout
        self.stacks = stacks
        self.failures = failures


class RankFailure(MoecommError):
    """At least one rank raised or died; `rank` is the one that did so first, `error` what it raised.

    Arguments:
        failures: for every rank that failed what it raised, in the order in which they failed.
        tracebacks: for each of those ranks, the traceback as text.
    """

    def __init__(self, failures: dict[int, BaseException], tracebacks: dict[int, str]) -> None:
        rank, error = next(iter(failures.items()))
        lines = [f"rank {rank} failed: {_one_line(error)}"]
        lines += [f"rank {other} failed too: {_one_line(failures[other])}" for other in failures if other != rank]
        lines.append(f"--- rank {rank}:\n{tracebacks.get(rank) or error}")
        super().__init__("\n".join(lines))
        self.rank = rank
        self.error = error
        self.failures = failures
        self.tracebacks = tracebacks


@dataclass(frozen=True)
class PackedError:
    """An exception in a form that any process can unpack, whatever the signature of its constructor."""

    blob: bytes
    text: str

    def unpack(self) -> BaseException:
        """Returns the exception, of its own class, without its traceback (that is `text`)."""
        kind, args, attributes = pickle.loads(self.blob)
        error: BaseException = kind.__new__(kind, *args)
        error.args = args
        error.__dict__.update(attributes)
        return error


def pack_error(error: BaseException) -> PackedError:
    """Packs an exception with its traceback; parts that cannot be pickled become their `repr`."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    args = tuple(_portable(arg) for arg in error.args)
    attributes = {name: _portable(value) for name, value in vars(error).items()}
    kind: Any = type(error)
    if _portable(kind) is not kind:
        kind, args, attributes = RuntimeError, (f"{kind.__qualname__}: {error}",), {}
    return PackedError(pickle.dumps((kind, args, attributes)), text)


def _portable(value: Any) -> Any:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:  # noqa: BLE001 - whatever a foreign __reduce__ raises means the same: it cannot travel
        return repr(value)
    return value


def _one_line(error: BaseException) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"


def _describe_exit(exitcode: int | None) -> str:
    if exitcode is None:
        return "ended and left no exit code"
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    try:
        return f"was killed by signal {-exitcode} ({signal.Signals(-exitcode).name})"
    except ValueError:
        return f"was killed by signal {-exitcode}"
