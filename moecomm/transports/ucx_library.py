"""Finds UCX: one that is loaded already, else the wheel's, else the system's. Nothing is loaded before it is asked for.

A process must not hold two of them, which would share half of their libraries; so what is loaded already comes first.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from moecomm import _C

__all__ = ["UcxLibrary", "find_library"]

_NAME = "libucp.so.0"


@dataclasses.dataclass(frozen=True)
class UcxLibrary:
    """What was found.

    Attributes:
        path: what the loader is given.
        version: such as `1.22.0`; empty if there is none.
        problem: the sentence why UCX cannot be used, or empty.
    """

    path: str = ""
    version: str = ""
    problem: str = ""


def _candidates() -> Iterator[tuple[str, int]]:
    """Paths, and the mode in which each is opened."""
    yield _NAME, os.RTLD_NOLOAD
    # The package itself is not imported, that would load it.
    wheel = importlib.util.find_spec("libucx")
    for folder in (wheel.submodule_search_locations or []) if wheel is not None else []:
        path = Path(folder, "lib", _NAME)
        if path.is_file():
            yield str(path), 0
    yield _NAME, 0


@functools.cache
def find_library() -> UcxLibrary:
    """The UCX of this process, or why there is none."""
    if not sys.platform.startswith("linux"):
        return UcxLibrary(problem=f"UCX needs Linux, this is {sys.platform}.")
    problem = ""
    for path, mode in _candidates():
        try:
            library = ctypes.CDLL(path, mode=mode | os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            problem = f"the library UCX cannot be loaded: {error}."
            continue
        numbers = [ctypes.c_uint() for _ in range(3)]
        library.ucp_get_version(*(ctypes.byref(number) for number in numbers))
        version = tuple(number.value for number in numbers)
        text = ".".join(map(str, version))
        if version[:2] >= _C.UCX_API_VERSION:
            return UcxLibrary(path, text)
        wanted = ".".join(map(str, _C.UCX_API_VERSION))
        return UcxLibrary(path, text, f"UCX {wanted} or newer is needed, {path} is {text}.")
    return UcxLibrary(problem=problem)
