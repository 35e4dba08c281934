"""Which of two kernels pushes rows as they are: Triton's, or the bulk copy engine's (csrc/cuda/push_bulk.cu).

Both leave the same bits, so ranks may choose differently. The engine can serve devices of compute capability 9.0 and
later where CuPy is, rows whose bytes, stride and addresses are multiples of 16, and no weights. It is asked for pushes
that read a mebibyte or more: for less, what a launch costs the host decides, and Triton's costs less.

Of each family of sizes the first pushes go through both in turn, timed by events that nobody waits for: where a stream
waits for a peer, a host that waits for the stream might be what the peer waits for. When the last event has passed the
faster one is taken, logged and kept on disk. MOECOMM_PUSH = "triton" or "bulk" forces one of them where both can serve;
"auto" is the default.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import triton

from moecomm.errors import TransportUnavailable
from moecomm.kernels.choices import Choices
from moecomm.kernels.cuda.loader import read_source
from moecomm.kernels.cuda.push_bulk import load_bulk_push
from moecomm.kernels.triton import tiles
from moecomm.kernels.triton.runtime import is_interpreted

__all__ = ["ENGINES", "PushCase", "PushEngines", "engines", "forced_engine"]

ENGINES = ("triton", "bulk")

_VARIABLE = "MOECOMM_PUSH"
_ALIGNMENT = 16
_MIN_BYTES = 1 << 20
_NUM_WARM = 1  # of each engine, not counted
_NUM_TIMED = 5

_log = logging.getLogger("moecomm.kernels")


class PushCase(NamedTuple):
    """All that the speed of a push depends on.

    Attributes:
        device: of the rows.
        num_tokens, num_slots: T and P.
        row_bytes: of a row.
        num_ranks: that have an address.
    """

    device: torch.device
    num_tokens: int
    num_slots: int
    row_bytes: int
    num_ranks: int

    @property
    def family(self) -> PushCase:
        """With the tokens rounded up to a power of two."""
        return self._replace(num_tokens=1 << max(0, self.num_tokens - 1).bit_length())


class _Trial:
    """The first pushes of a family, in turn through both engines."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.runs: list[tuple[str, Any, Any]] = []

    def next_engine(self) -> str | None:
        """The engine whose turn it is; None = all have had theirs."""
        if self.num_begun == len(ENGINES) * (_NUM_WARM + _NUM_TIMED):
            return None
        self.num_begun += 1
        return ENGINES[self.num_begun % len(ENGINES)]

    def medians(self) -> list[float] | None:
        """Milliseconds of each engine, in the order of `ENGINES`; None = a run is still to come, or has not ended."""
        runs = self.runs
        if len(runs) < len(ENGINES) * (_NUM_WARM + _NUM_TIMED) or not all(end.query() for _, _, end in runs):
            return None
        times = {engine: [begin.elapsed_time(end) for name, begin, end in runs if name == engine] for engine in ENGINES}
        return [sorted(times[engine][_NUM_WARM:])[_NUM_TIMED // 2] for engine in ENGINES]


@final
class PushEngines:
    """Decides, push by push, and remembers. May be used by several threads.

    Arguments:
        choices: where what was measured is kept.
    """

    def __init__(self, choices: Choices | None = None) -> None:
        self._choices = choices or Choices()
        self._lock = threading.Lock()
        self._refusals: dict[torch.device, str | None] = {}
        self._chosen: dict[PushCase, str] = {}
        self._trials: dict[PushCase, _Trial] = {}
        self.forced: str | None = None

    def serve(self, case: PushCase, alignment: int) -> bool:
        """Whether the bulk copy engine is to be thought of at all: there is one, and it can move such rows.

        Arguments:
            alignment: a power of two up to 16 that divides bytes, stride and addresses of the rows.

        Raises:
            ValueError: MOECOMM_PUSH is none of "auto", "triton" and "bulk".
        """
        wanted = self._wanted()
        if wanted == "triton" or alignment < _ALIGNMENT or case.device.type != "cuda" or is_interpreted():
            return False
        if wanted == "auto" and case.num_tokens * case.row_bytes < _MIN_BYTES:
            return False
        return self._refusal(case.device, is_wanted=wanted == "bulk") is None

    def run(self, case: PushCase, launches: Mapping[str, Callable[[], None]]) -> None:
        """Pushes, through the engine that is wanted, known to be faster, or has its turn.

        Arguments:
            launches: by engine, what launches it on the current stream.
        """
        if self._wanted() == "bulk":
            launches["bulk"]()
            return
        family = case.family
        chosen = self._chosen.get(family)
        if chosen is not None:
            launches[chosen]()
        elif torch.cuda.is_current_stream_capturing():
            launches["triton"]()  # a graph repeats what it has captured; nothing in it can be measured
        else:
            self._try(family, launches)

    def _try(self, family: PushCase, launches: Mapping[str, Callable[[], None]]) -> None:
        with self._lock:
            if family not in self._trials:
                kept = self._choices.recall(_key(family), ENGINES)
                if kept is not None:
                    self._chosen[family] = kept
                self._trials[family] = _Trial()
            trial = self._trials[family]
            engine = self._chosen.get(family)
            is_timed = False
            if engine is None:
                engine = trial.next_engine()
                is_timed = engine is not None
            if engine is None:
                engine = self._decide(family, trial)
        if not is_timed:
            launches[engine]()
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        stream = torch.cuda.current_stream(family.device)
        begin.record(stream)
        launches[engine]()
        end.record(stream)
        with self._lock:
            trial.runs.append((engine, begin, end))

    def _decide(self, family: PushCase, trial: _Trial) -> str:
        medians = trial.medians()
        if medians is None:
            return "triton"
        chosen = str(self._choices.keep(_key(family), ENGINES, medians))
        trial.runs.clear()
        self._chosen[family] = chosen
        times = ", ".join(f"{engine} {time:.4f} ms" for engine, time in zip(ENGINES, medians, strict=True))
        sizes = f"{family.num_tokens} rows of {family.row_bytes} bytes, {family.num_slots} slots"
        _log.info("push of up to %s: %s (measured: %s)", sizes, chosen, times)
        return chosen

    def _wanted(self) -> str:
        wanted = self.forced or os.environ.get(_VARIABLE, "auto")
        if wanted != "auto" and wanted not in ENGINES:
            raise ValueError(f"{_VARIABLE} is {wanted!r}; wanted 'auto', 'triton' or 'bulk'")
        return wanted

    def _refusal(self, device: torch.device, *, is_wanted: bool) -> str | None:
        if device in self._refusals:
            return self._refusals[device]
        if torch.cuda.is_current_stream_capturing():
            return "a graph is being captured, in which nothing can be loaded"
        try:
            load_bulk_push(device)
            refusal = None
        except (TransportUnavailable, RuntimeError) as error:
            refusal = str(error)
            level = logging.WARNING if is_wanted else logging.DEBUG
            _log.log(level, "rows are pushed by Triton, not by the bulk copy engine: %s", refusal)
        return self._refusals.setdefault(device, refusal)


engines = PushEngines()


@contextlib.contextmanager
def forced_engine(name: str) -> Iterator[None]:
    """Inside, in every thread, pushes go through this engine where it can serve, whatever was measured: for checks."""
    before, engines.forced = engines.forced, name
    try:
        yield
    finally:
        engines.forced = before


def _key(family: PushCase) -> dict[str, Any]:
    return {
        "what": "push",
        "sizes": list(family[1:]),
        "device": torch.cuda.get_device_name(family.device),
        "triton": triton.__version__,
        "source": _source_hash(),
    }


@functools.cache
def _source_hash() -> str:
    """Of both kernels and the rules here: it changes whenever a measurement may have become wrong."""
    digest = hashlib.sha256()
    for path in (Path(tiles.__file__), Path(__file__).with_name("push.py"), Path(__file__)):
        digest.update(path.read_bytes())
    source, headers = read_source("push_bulk")
    digest.update("".join([source, *(headers[name] for name in sorted(headers))]).encode())
    return digest.hexdigest()
