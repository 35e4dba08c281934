"""Finds NVSHMEM: its host library, its version, and the bitcode that kernels are linked with. Nothing is loaded to ask.

The wheels name the bitcode in two ways: up to 3.6 there is one file, `libnvshmem_device.bc`; from 3.7 on one for each
architecture, `libnvshmem_device_sm_90.bc`. A GPU runs what was made for a lower architecture of its family (the
compute capability's major number), so the highest of these that is not above its own is taken.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "OLDEST",
    "REMEDY",
    "NvshmemLibrary",
    "bitcode_in",
    "find_library",
    "library_folders",
    "library_in",
    "missing_package",
]

OLDEST = (3, 4)
REMEDY = (
    "Install it with `pip install 'moecomm[nvshmem]'` (CUDA 13; for CUDA 12 the packages nvshmem4py-cu12 and "
    "nvidia-nvshmem-cu12) on every host, or set NVSHMEM_HOME to where an NVSHMEM 3.4 or newer is."
)

_NAME = "libnvshmem_host.so.3"
_ONE_FOR_ALL = "libnvshmem_device.bc"
_FOR_ONE = re.compile(r"libnvshmem_device_sm_(\d+)\.bc")
_VERSION_LINE = re.compile(r"#define NVSHMEM_VENDOR_(MAJOR|MINOR|PATCH)_VERSION (\d+)")


@dataclasses.dataclass(frozen=True)
class NvshmemLibrary:
    """What was found.

    Attributes:
        path: of the host library; empty if there is none.
        version: such as `3.8.0`; empty if it is not known.
        problem: the sentence why NVSHMEM cannot be used, or empty.
    """

    path: str = ""
    version: str = ""
    problem: str = ""

    def bitcode(self, capability: int) -> Path | None:
        """The bitcode for a compute capability such as 90, or None; see `bitcode_in`."""
        return bitcode_in(Path(self.path).parent, capability) if self.path else None


def bitcode_in(folder: Path, capability: int) -> Path | None:
    """The bitcode for a GPU in a folder of libraries.

    Arguments:
        folder: such as `nvidia/nvshmem/lib` of the wheel.
        capability: compute capability times ten: 90, 100, 103.

    Returns: the file for the highest architecture of the family up to it, else the one for all, else None.
    """
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    made_for = {int(found[1]): name for name in names if (found := _FOR_ONE.fullmatch(name))}
    usable = [one for one in made_for if one // 10 == capability // 10 and one <= capability]
    if usable:
        return folder / made_for[max(usable)]
    return folder / _ONE_FOR_ALL if _ONE_FOR_ALL in names else None


def library_folders() -> list[Path]:
    """Where NVSHMEM may be, the first choice first: what NVSHMEM_HOME says, the wheel, the system's."""
    home = os.environ.get("NVSHMEM_HOME", "")
    folders = [Path(home, "lib"), Path(home, "lib64")] if home else []
    wheels = importlib.util.find_spec("nvidia")  # a folder of several packages' parts; looking imports none of them
    folders += (
        [Path(place, "nvshmem", "lib") for place in (wheels.submodule_search_locations or []) if place]
        if wheels
        else []
    )
    system = (
        "/usr/local/nvshmem/lib",
        "/opt/nvidia/nvshmem/lib",
        "/usr/lib/x86_64-linux-gnu/nvshmem/13",
        "/usr/lib/x86_64-linux-gnu/nvshmem/12",
        "/usr/lib/aarch64-linux-gnu/nvshmem/13",
        "/usr/lib/aarch64-linux-gnu/nvshmem/12",
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/local/lib",
    )
    return [*folders, *map(Path, system)]


def library_in(folders: Iterable[Path]) -> NvshmemLibrary:
    """The first NVSHMEM in these folders; its version is read from the headers beside it; unknown is no fault."""
    for folder in folders:
        if not (folder / _NAME).is_file():
            continue
        version = _version_beside(folder)
        text = ".".join(map(str, version))
        if version and version[:2] < OLDEST:
            wanted = ".".join(map(str, OLDEST))
            return NvshmemLibrary(
                str(folder / _NAME), text, f"NVSHMEM {wanted} or newer is needed, that in {folder} is {text}."
            )
        return NvshmemLibrary(str(folder / _NAME), text)
    return NvshmemLibrary(problem=f"the library NVSHMEM ({_NAME}) was not found.")


def _version_beside(folder: Path) -> tuple[int, ...]:
    for include in (folder.parent / "include", *(folder.parent / "include").glob("nvshmem*")):
        try:
            text = (include / "non_abi" / "nvshmem_version.h").read_text(encoding="utf-8")
        except OSError:
            continue
        parts = {name: int(number) for name, number in _VERSION_LINE.findall(text)}
        if len(parts) == 3:
            return parts["MAJOR"], parts["MINOR"], parts["PATCH"]
    return ()


def missing_package() -> str:
    """The sentence that says that nvshmem4py is missing, or nothing; looking does not import it."""
    if importlib.util.find_spec("nvshmem") is None:
        return "the Python package nvshmem4py is not installed."
    return ""


def _loaded() -> list[Path]:
    """The folder of the NVSHMEM that this process has loaded: it cannot use a second one."""
    try:
        ctypes.CDLL(_NAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [Path(line.split(maxsplit=5)[5]).parent for line in maps.splitlines() if line.endswith(_NAME)][:1]


@functools.cache
def find_library() -> NvshmemLibrary:
    """The NVSHMEM of this process, or why there is none."""
    if not sys.platform.startswith("linux"):
        return NvshmemLibrary(problem=f"NVSHMEM needs Linux, this is {sys.platform}.")
    return library_in([*_loaded(), *library_folders()])
