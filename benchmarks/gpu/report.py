"""What a run found: records, the table beside the goals, JSON."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any, Literal

import torch
from timing import Timing

from moecomm.cli.console import Column
from moecomm.version import __version__

__all__ = ["Record", "checked", "compared", "facts", "is_bad", "merged", "table", "to_json", "unmeasured", "verdict"]


@dataclass(frozen=True)
class Record:
    """One line of the table.

    Attributes:
        part: "checks", "rows", ...
        what: the operation; `shape`: of its operands, in words.
        median_us, p90_us, repetitions: None = not timed.
        bytes, flops: moved or done by the operation; None = not counted.
        bound: what the time is held against, in words; `bound_us`: its time.
        fraction: bound_us / median_us; where the goal is "at most": median_us / bound_us.
        goal: for `fraction`; `goal_is`: how.
        wrong: elements that differ from the right answer, all over; None = not checked.
        note: why something is not measured. `is_error`: and it should have been.
    """

    part: str
    what: str
    shape: str
    median_us: float | None = None
    p90_us: float | None = None
    repetitions: int | None = None
    bytes: int | None = None
    flops: int | None = None
    bound: str | None = None
    bound_us: float | None = None
    fraction: float | None = None
    goal: float | None = None
    goal_is: Literal["at least", "at most"] = "at least"
    wrong: int | None = None
    note: str | None = None
    is_error: bool = False

    @property
    def gbps(self) -> float | None:
        """GB/s of `bytes`, 1 GB = 10^9 bytes."""
        return self.bytes / self.median_us * 1e-3 if self.bytes is not None and self.median_us else None

    @property
    def tflops(self) -> float | None:
        """TFLOP/s."""
        return self.flops / self.median_us * 1e-6 if self.flops is not None and self.median_us else None

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is reached; None = there is none, or no figure."""
        if self.goal is None or self.fraction is None:
            return None
        return self.fraction >= self.goal if self.goal_is == "at least" else self.fraction <= self.goal


def checked(part: str, what: str, shape: str, wrong: int) -> Record:
    """An answer that was compared, without a time."""
    return Record(part, what, shape, wrong=wrong)


def unmeasured(part: str, what: str, shape: str, note: str, *, is_error: bool = False) -> Record:
    """A line that says why it has no figures."""
    return Record(part, what, shape, note=note, is_error=is_error)


def compared(
    part: str,
    what: str,
    shape: str,
    timing: Timing,
    *,
    bound: str | None = None,
    bound_us: float | None = None,
    goal: float | None = None,
    goal_is: Literal["at least", "at most"] = "at least",
    num_bytes: int | None = None,
    flops: int | None = None,
    wrong: int | None = None,
) -> Record:
    """A measured operation, held against a bound."""
    fraction = None
    if bound_us is not None:
        fraction = bound_us / timing.median_us if goal_is == "at least" else timing.median_us / bound_us
    return Record(
        part=part,
        what=what,
        shape=shape,
        median_us=timing.median_us,
        p90_us=timing.p90_us,
        repetitions=timing.repetitions,
        bytes=num_bytes,
        flops=flops,
        bound=bound,
        bound_us=bound_us,
        fraction=fraction,
        goal=goal,
        goal_is=goal_is,
        wrong=wrong,
    )


def verdict(records: Sequence[Record]) -> str:
    """A sentence: how many lines hold a checked answer, whether all were right, what broke, what was left out."""
    wrong, errors = sum(record.wrong or 0 for record in records), sum(record.is_error for record in records)
    left_out = sum(record.note is not None for record in records) - errors
    answers = sum(record.wrong is not None for record in records)
    parts = [f"{answers} answers checked, {f'{wrong} wrong elements' if wrong else 'none wrong'}"]
    parts += [f"{errors} errors"] if errors else []
    parts += [f"{left_out} not measured"] if left_out else []
    return "; ".join(parts)


def is_bad(records: Sequence[Record]) -> bool:
    """Whether an answer was wrong or something broke."""
    return any(record.wrong or record.is_error for record in records)


def facts(device: torch.device) -> dict[str, Any]:
    """What a figure depends on: device, driver, versions, date."""
    found: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": platform.processor() or "CPU",
        "versions": {"moecomm": __version__, "python": platform.python_version(), "cuda": torch.version.cuda},
    }
    for name in ("torch", "triton", "cupy-cuda13x", "cupy-cuda12x"):
        try:
            found["versions"][name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "num_devices": torch.cuda.device_count(),
            "num_sms": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "driver": _driver(),
        }
    return found


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0] if lines else None


_NOTE = 160  # characters of a note in the table; JSON has all
_COLUMNS = (
    Column("part"),
    Column("what"),
    Column("shape"),
    Column("median", "right"),
    Column("p90", "right"),
    Column("rate", "right"),
    Column("against"),
    Column("is", "right"),
    Column("goal", "right"),
    Column("wrong", "right"),
)


def table(records: Sequence[Record]) -> tuple[list[Column], list[list[str]]]:
    """Columns, and one line of texts per record; a note stands where the figures would."""
    return list(_COLUMNS), [_line(record) for record in records]


def _line(record: Record) -> list[str]:
    goal = "" if record.goal is None else f"{'' if record.goal_is == 'at least' else 'at most '}{record.goal:g}"
    if record.is_met is not None:
        goal += " met" if record.is_met else " missed"
    rate = ""
    if record.tflops is not None:
        rate = f"{record.tflops:.0f} TFLOP/s"
    elif record.gbps is not None:
        rate = f"{record.gbps:.0f} GB/s"
    against = record.bound or ""
    if record.note is not None:
        note = f"{'ERROR: ' if record.is_error else ''}{' '.join(record.note.split())}"
        against = note if len(note) <= _NOTE else f"{note[: _NOTE - 4]} ..."
    return [
        record.part,
        record.what,
        record.shape,
        _microseconds(record.median_us),
        _microseconds(record.p90_us),
        rate,
        against,
        "" if record.fraction is None else f"{record.fraction:.2f}",
        goal,
        "" if record.wrong is None else str(record.wrong),
    ]


def _microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} us" if value < 1000 else f"{value / 1000:.3f} ms"


def to_json(found: dict[str, Any], records: Sequence[Record]) -> str:
    """The facts and every record, with the figures that follow from its fields."""
    lines = [
        {**asdict(record), "gbps": record.gbps, "tflops": record.tflops, "goal_met": record.is_met}
        for record in records
    ]
    return json.dumps({**found, "records": lines}, indent=1)


def merged(text: str) -> list[Record]:
    """The records of `to_json`."""
    derived = ("gbps", "tflops", "goal_met")
    return [
        Record(**{name: value for name, value in line.items() if name not in derived})
        for line in json.loads(text)["records"]
    ]
