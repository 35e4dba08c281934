"""Compiles csrc/cuda at run time, keeps the result on disk and loads it: NVRTC and the driver, both through CuPy.

What is kept is named by a hash of the source, of the headers that it includes, of the architecture and of the compiler.
So nothing is ever out of date, and processes that compile the same at the same time write the same.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from moecomm.errors import TransportUnavailable

__all__ = ["compiled_file", "load_kernel", "read_source"]

_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
_CUBIN = b"\x7fELF"
_REMEDY = "Install the optional parts: pip install 'moecomm[gpu]'."


def load_kernel(name: str, device: int, *, min_capability: int) -> Any:
    """The kernel `name` of csrc/cuda/`name`.cu, ready to be launched on a device.

    Arguments:
        name: of the file and of the function.
        device: index of a CUDA device.
        min_capability: compute capability that it needs, times ten: 90.

    Returns:
        A `cupy.RawKernel`.

    Raises:
        TransportUnavailable: CuPy, its compiler, a driver or a device that can run it is missing; says what to do.
        RuntimeError: the source does not compile.
    """
    architecture = _architecture(name, device, min_capability)
    with _cupy(name).cuda.Device(device):  # or the current device would load it as well
        return _loaded(name, architecture)


@functools.cache
def _loaded(name: str, architecture: str) -> Any:
    return _cupy(name).RawModule(path=str(compiled_file(name, architecture))).get_function(name)


def compiled_file(name: str, architecture: str) -> Path:
    """A file with csrc/cuda/`name`.cu compiled for an architecture ("sm_90a"). Needs no device.

    It lies in `$XDG_CACHE_HOME/moecomm` or `~/.cache/moecomm`; where that cannot be written to, in a folder that goes
    away with this process.

    Raises:
        TransportUnavailable: CuPy or its compiler is missing.
        RuntimeError: the source does not compile.
    """
    source, headers = read_source(name)
    nvrtc = _nvrtc(name)
    options = (f"--gpu-architecture={architecture}", "--std=c++17")
    parts = [source, *(text for header in sorted(headers.items()) for text in header), *options]
    key = hashlib.sha256(repr([nvrtc.getVersion(), *parts]).encode()).hexdigest()[:32]
    file_name = f"{name}-{architecture}-{key}.cubin"
    kept = _cache_folder() / file_name
    if _is_whole(kept):
        return kept
    binary = _compile(nvrtc, name, source, headers, options)
    try:
        return _write(binary, kept)
    except OSError:
        return _write(binary, Path(_folder_of_this_process().name) / file_name)


def read_source(name: str) -> tuple[str, dict[str, str]]:
    """The text of csrc/cuda/`name`.cu, and by name the texts of all headers there that it includes, directly or not."""
    folder = _source_folder()
    source = (folder / f"{name}.cu").read_text(encoding="utf-8")
    headers: dict[str, str] = {}
    waiting = _INCLUDE.findall(source)
    while waiting:
        header = waiting.pop()
        path = folder / header
        if header not in headers and path.is_file():
            headers[header] = path.read_text(encoding="utf-8")
            waiting += _INCLUDE.findall(headers[header])
    return source, headers


def _source_folder() -> Path:
    """An installed package carries the sources; in a checkout they are where they are written."""
    installed = Path(__file__).parent / "source"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "csrc" / "cuda"


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "moecomm"


@functools.cache
def _folder_of_this_process() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="moecomm-", ignore_cleanup_errors=True)


def _is_whole(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_CUBIN)) == _CUBIN
    except OSError:
        return False


def _write(binary: bytes, path: Path) -> Path:
    """Each process writes a file of its own, which gets its name when it is whole: a reader never sees half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unnamed = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with open(handle, "wb") as file:
            file.write(binary)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unnamed, path)
    except BaseException:
        os.unlink(unnamed)
        raise
    return path


def _compile(nvrtc: Any, name: str, source: str, headers: dict[str, str], options: tuple[str, ...]) -> bytes:
    texts, names = ([text.encode() for text in part] for part in (headers.values(), headers))
    program = nvrtc.createProgram(source, f"{name}.cu", texts, names)
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        said = nvrtc.getProgramLog(program)
        raise RuntimeError(f"{name}.cu does not compile with {' '.join(options)}: {error}\n{said}") from error
    finally:
        nvrtc.destroyProgram(program)


def _cupy(name: str) -> Any:
    try:
        return import_module("cupy")
    except ImportError as error:
        raise TransportUnavailable(f"CUDA kernel {name}", f"CuPy cannot be imported ({error}).", _REMEDY) from error


def _nvrtc(name: str) -> Any:
    nvrtc = _cupy(name).cuda.nvrtc
    try:
        nvrtc.getVersion()
    except Exception as error:  # noqa: BLE001  which exception says that a library is missing has changed between versions
        remedy = "Install the CUDA toolkit, or CuPy with it: pip install 'cupy-cuda13x[ctk]'."
        raise TransportUnavailable(
            f"CUDA kernel {name}", f"NVRTC cannot be loaded ({' '.join(str(error).split())}).", remedy
        ) from error
    return nvrtc


def _architecture(name: str, device: int, min_capability: int) -> str:
    """The target of a device, with what only its family has: "sm_90a"."""
    runtime = _cupy(name).cuda.runtime
    try:
        properties = runtime.getDeviceProperties(device)
    except runtime.CUDARuntimeError as error:
        remedy = "Run where there is a GPU with a driver for this version of CUDA; nvidia-smi shows both."
        reason = f"CUDA device {device} cannot be used ({error})."
        raise TransportUnavailable(f"CUDA kernel {name}", reason, remedy) from error
    capability = 10 * properties["major"] + properties["minor"]
    if capability < min_capability:
        raise TransportUnavailable(
            f"CUDA kernel {name}",
            f"it needs compute capability {min_capability / 10}; device {device} has {capability / 10}.",
            "Use the Triton kernels, which run on this device.",
        )
    return f"sm_{capability}{'a' if capability >= 90 else ''}"
