"""Measured choices, made once per process and kept on disk for the next: tile shapes, implementations.

One small JSON file per key under the user's cache folder. A file is written beside its place and renamed, so processes
that measure the same at the same time each leave a whole file, and the last one stays. A folder that cannot be read or
written means measuring again, no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Choices", "cache_folder"]

_log = logging.getLogger("moecomm.kernels")


def cache_folder() -> Path:
    """Where choices are kept: `moecomm/choices` under XDG_CACHE_HOME, by default `~/.cache`."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # The standard says that a relative path there is to be ignored.
    base = Path(root) if Path(root).is_absolute() else Path("~/.cache").expanduser()
    return base / "moecomm" / "choices"


class Choices:
    """Remembers which candidate was the fastest, by key.

    Arguments:
        folder: of the files; None = `cache_folder()` at the time of the call.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._known: dict[str, Any] = {}

    def choose(self, key: Mapping[str, Any], candidates: Sequence[Any], measure: Callable[[Any], float]) -> Any:
        """The fastest of `candidates`: as remembered, as on disk, or as measured now.

        Arguments:
            key: all that the answer depends on; values that JSON can hold.
            candidates: values that JSON gives back equal, at least one; the first is taken if none can be measured.
            measure: the time that a candidate takes, in any unit; infinity = it cannot be used.
        """
        kept = self.recall(key, candidates)
        if kept is not None:
            return kept
        return self.keep(key, candidates, [measure(candidate) for candidate in candidates])

    def recall(self, key: Mapping[str, Any], candidates: Sequence[Any]) -> Any | None:
        """The choice as remembered or as on disk; None = nobody has measured it, or it is none of `candidates`."""
        text = json.dumps(key, sort_keys=True)
        if text not in self._known:
            kept = _read(self._path(text), text)
            if kept is None or kept not in candidates:
                return None
            self._known[text] = kept
        return self._known[text]

    def keep(self, key: Mapping[str, Any], candidates: Sequence[Any], times: Sequence[float]) -> Any:
        """Remembers the fastest, and writes it to disk; for what is measured elsewhere than in `choose`.

        Arguments:
            times: one per candidate; if all are infinite the first one is remembered, and nothing written.

        Returns:
            The fastest candidate.
        """
        text = json.dumps(key, sort_keys=True)
        best = min(range(len(candidates)), key=times.__getitem__)
        if math.isinf(times[best]):
            return self._known.setdefault(text, candidates[0])
        _log.info("measured %s: %s", text, {str(c): t for c, t in zip(candidates, times, strict=True)})
        _write(self._path(text), {"key": text, "choice": candidates[best], "time": times[best]})
        self._known[text] = candidates[best]
        return candidates[best]

    def _path(self, text: str) -> Path:
        return (self._folder or cache_folder()) / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _read(path: Path, text: str) -> Any:
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return entry.get("choice") if isinstance(entry, dict) and entry.get("key") == text else None


def _write(path: Path, entry: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    except OSError as error:
        _log.info("choices are not kept: %s", error)
        return
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(entry, file)
        os.replace(name, path)
    except OSError as error:
        _log.info("choices are not kept: %s", error)
        with contextlib.suppress(OSError):
            os.unlink(name)
