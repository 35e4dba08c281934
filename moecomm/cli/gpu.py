"""What `moecomm info` says about GPUs: the parts that the kernels for them need, and what is missing; plain values.

Nothing of it is imported to be found: versions are read off what is installed, libraries are looked for by name.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

__all__ = ["GPU_PACKAGES", "gpu_facts", "gpu_parts"]

_EXTRA = "pip install 'moecomm[gpu]'"
# Module -> what it gives, how to get it, and the packages that bring it.
GPU_PACKAGES = {
    "triton": (
        "kernels for GPUs: rows, low latency, grouped GEMM of the experts",
        f"pip install triton, or all for GPUs: {_EXTRA}",
        ("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm"),
    ),
    "cupy": (
        "peer memory of GPUs by CUDA IPC, and kernels in CUDA C++: row push by the bulk copy engine",
        f"{_EXTRA} (for CUDA 13; for CUDA 12: pip install cupy-cuda12x)",
        ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    ),
}
_NVRTC_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")


def gpu_parts() -> list[dict[str, Any]]:
    """The optional parts that only GPUs need, as `moecomm.cli.facts` lists them: name, version, gives, remedy."""
    parts = [
        {"name": name, "version": _version_of(name, packages), "gives": gives, "remedy": remedy}
        for name, (gives, remedy, packages) in GPU_PACKAGES.items()
    ]
    parts.append(
        {
            "name": "NVRTC",
            "version": _nvrtc(),
            "gives": "compiles kernels in CUDA C++ where they run, once",
            "remedy": "the CUDA toolkit, or pip install 'cupy-cuda13x[ctk]'",
        }
    )
    parts.append(
        {
            "name": "nvcc",
            "version": shutil.which("nvcc"),
            "gives": "compiles the same in tests; nothing needs it to run",
            "remedy": "the CUDA toolkit",
        }
    )
    return parts


def gpu_facts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Devices, and what is missing for GPUs to be used, each with what helps.

    Arguments:
        parts: as from `gpu_parts`.
    """
    import torch

    devices = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            devices.append({"name": torch.cuda.get_device_name(index), "capability": f"{major}.{minor}"})
    missing = []
    if torch.version.cuda is None:
        missing.append(
            {"what": f"torch {torch.__version__} is built without CUDA", "remedy": "install one built with it"}
        )
    if not _has_driver():
        missing.append(
            {"what": "no NVIDIA driver (libcuda.so.1)", "remedy": "install it; in a container, allow the use of GPUs"}
        )
    elif not devices and torch.version.cuda is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        missing.append({"what": f"torch sees no device{hint}", "remedy": "ask nvidia-smi for devices and driver"})
    versions = {part["name"]: part["version"] for part in parts}
    missing += [
        {"what": f"{part['name']}: {part['gives']}", "remedy": part["remedy"]}
        for part in parts
        if versions[part["name"]] is None and part["name"] != "nvcc"
    ]
    return {"devices": devices, "missing": missing}


def _version_of(module: str, packages: tuple[str, ...]) -> str | None:
    """The version of a module that can be imported, or None; without a known package its version is `unknown`."""
    if importlib.util.find_spec(module) is None:
        return None
    found = []
    for package in packages:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        found.append(version if package == module else f"{version} ({package})")
    return ", ".join(found) or "unknown"


def _nvrtc() -> str | None:
    """Where NVRTC is: a package with its version, or a library; None if neither is found."""
    for package in _NVRTC_PACKAGES:
        try:
            return f"{importlib.metadata.version(package)} ({package})"
        except importlib.metadata.PackageNotFoundError:
            continue
    for name in ("CUDA_PATH", "CUDA_HOME"):
        if name in os.environ:
            libraries = sorted(Path(os.environ[name]).glob("lib*/libnvrtc.so*"))
            if libraries:
                return str(libraries[0])
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        libraries = sorted(Path(nvcc).resolve().parents[1].glob("lib*/libnvrtc.so*"))
        if libraries:
            return str(libraries[0])
    return ctypes.util.find_library("nvrtc")


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
