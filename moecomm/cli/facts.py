"""What `moecomm info` says: facts about the build, the machine, limits, transports, optional parts; plain values."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
from pathlib import Path
from typing import Any

from moecomm.cli.gpu import gpu_facts, gpu_parts
from moecomm.version import __version__

__all__ = ["OPTIONAL_PACKAGES", "OTHER_HOSTS", "collect"]

# Package -> what it gives, and the command that installs it.
OPTIONAL_PACKAGES = {
    "rich": ("tables, colours and progress bars on a terminal", "pip install 'moecomm[cli]'"),
    "matplotlib": ("the plots of moecomm bench and moecomm demo", "pip install 'moecomm[cli]'"),
    "psutil": ("the number of physical cores in moecomm info", "pip install 'moecomm[cli]'"),
    "libucx-cu13": ("transport ucx, between hosts over TCP", "pip install 'moecomm[ucx]'"),
    "nvidia-nvshmem-cu13": (
        "transport nvshmem: the library and what kernels are linked with",
        "pip install 'moecomm[nvshmem]'",
    ),
    "nvshmem4py-cu13": ("transport nvshmem: its calls from Python", "pip install 'moecomm[nvshmem]'"),
    "mpi4py": ("moecomm bench --against mpi", "pip install 'moecomm[bench]' (needs an MPI: apt install openmpi-bin)"),
}
# Those whom a transport between hosts is for, among the groups that are imagined.
OTHER_HOSTS = "other hosts"
# Environment variables of others that change what is measured or reached.
NEIGHBOUR_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES")
LIMITS = {
    "RLIMIT_MEMLOCK": "bytes that may be locked in memory",
    "RLIMIT_NOFILE": "open files",
    "RLIMIT_AS": "bytes of address space",
}


def collect() -> dict[str, Any]:
    """All facts, by section; every value can be written as JSON."""
    return {
        "moecomm": _package(),
        "native": _native(),
        "machine": _machine(),
        "limits": _limits(),
        "transports": _transports(),
        "environment": _environment(),
        "gpu": gpu_facts(gpu_parts()),
        "optional": _optional(),
    }


def _package() -> dict[str, Any]:
    import numpy
    import torch

    return {
        "version": __version__,
        "location": str(Path(__file__).parents[1]),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        "cuda": torch.version.cuda,
        "cuda_devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    }


def _native() -> dict[str, Any]:
    try:
        from moecomm import _C
    except ImportError as error:
        return {"built": False, "reason": str(error), "remedy": "build it: pip install . (needs a C++17 compiler)"}
    return {
        "built": True,
        "file": _C.__file__,
        "compiler": _compiler(Path(_C.__file__)),
        "instruction_set": _C.instruction_set(),
        "instruction_sets": dict(_C.cpu_features()),
    }


def _compiler(library: Path) -> str | None:
    """The compiler as it signs its object files, or None where it does not."""
    found = re.search(rb"GCC: \([^)\0]*\) [0-9.]+|clang version [0-9.]+", library.read_bytes())
    return None if found is None else found.group().decode()


def _machine() -> dict[str, Any]:
    memory = _meminfo()
    shared = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "physical_cores": _physical_cores(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "cpu_quota": _cpu_quota(),
        "load_average": os.getloadavg()[0],
        "memory_bytes": memory.get("MemTotal"),
        "memory_available_bytes": memory.get("MemAvailable"),
        "dev_shm_bytes": None if shared is None else shared.total,
        "dev_shm_free_bytes": None if shared is None else shared.free,
    }


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.processor()


def _physical_cores() -> int | None:
    if importlib.util.find_spec("psutil") is None:
        return None
    import psutil

    count: int | None = psutil.cpu_count(logical=False)
    return count


def _cpu_quota() -> float | None:
    """Cores' worth of time that the container may use, or None if it has no such limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}


def _limits() -> dict[str, Any]:
    limits: dict[str, Any] = {}
    for name, meaning in LIMITS.items():
        soft, hard = resource.getrlimit(getattr(resource, name))
        limits[name] = {
            "meaning": meaning,
            "soft": None if soft == resource.RLIM_INFINITY else soft,
            "hard": None if hard == resource.RLIM_INFINITY else hard,
        }
    return limits


def _transports() -> list[dict[str, Any]]:
    """Each transport in the order in which it is asked, and whom it reaches: some groups of two are imagined."""
    import dataclasses

    from moecomm.devices.base import DeviceIdentity
    from moecomm.devices.registry import find_device
    from moecomm.errors import TransportUnavailable
    from moecomm.groups import SoloGroup
    from moecomm.transports.peers import my_identity
    from moecomm.transports.registry import refusal, transport_class, transport_names

    me = my_identity(SoloGroup())
    groups = {
        "threads of one process": [me, dataclasses.replace(me, rank=1)],
        "processes of this host": [
            dataclasses.replace(me, in_process=False),
            dataclasses.replace(me, rank=1, in_process=False, pid=me.pid + 1, process="another"),
        ],
        OTHER_HOSTS: [
            dataclasses.replace(me, in_process=False),
            dataclasses.replace(me, rank=1, in_process=False, process="another", host="another", hostname="another"),
        ],
    }
    gpu, no_gpu, gpu_remedy = DeviceIdentity(), "", ""
    try:
        gpu = find_device("cuda").identity()
    except TransportUnavailable as error:
        no_gpu, gpu_remedy = error.reason, error.remedy
    except ValueError:
        no_gpu, gpu_remedy = "torch finds no CUDA device.", "See what is missing for GPUs."
    found = []
    for name in transport_names():
        transport = transport_class(name)
        remedy = transport.remedy()
        reasons: dict[str, str | None]
        if "cpu" in transport.capabilities.device_types:
            reasons = {who: refusal(transport, peers[0], peers) for who, peers in groups.items()}
        elif no_gpu:
            reasons, remedy = dict.fromkeys(groups, no_gpu), gpu_remedy
        else:
            on_gpu = {
                who: [dataclasses.replace(peer, device_type="cuda", device=gpu) for peer in peers]
                for who, peers in groups.items()
            }
            reasons = {who: refusal(transport, peers[0], peers) for who, peers in on_gpu.items()}
        reached = [who for who, reason in reasons.items() if reason is None]
        found.append(
            {
                "name": name,
                "answers": bool(reached),
                "reaches": reached,
                "refuses": {who: reason for who, reason in reasons.items() if reason is not None},
                "remedy": remedy,
                "device_types": list(transport.capabilities.device_types),
                "crosses_hosts": transport.capabilities.crosses_hosts,
            }
        )
    return [*found, _collective()]


def _collective() -> dict[str, Any]:
    """The exchange through torch.distributed, which stands beside the transports."""
    import torch.distributed as dist

    who = "processes of a torch.distributed group"
    reason = None
    if not dist.is_available():
        reason = "this torch is built without torch.distributed."
    elif not dist.is_gloo_available():
        reason = "this torch is built without gloo."
    return {
        "name": "collective",
        "answers": reason is None,
        "reaches": [] if reason else [f"{who}, slowly: a baseline, and the last resort"],
        "refuses": {who: reason} if reason else {},
        "remedy": "Install a torch that has gloo, such as the wheels of PyPI for Linux.",
        "device_types": ["cpu"],
        "crosses_hosts": True,
    }


def _environment() -> dict[str, str]:
    names = sorted(name for name in os.environ if name.startswith("MOECOMM_"))
    return {name: os.environ[name] for name in (*names, *NEIGHBOUR_VARIABLES) if name in os.environ}


def _optional() -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for name, (gives, remedy) in OPTIONAL_PACKAGES.items():
        try:
            version: str | None = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        parts.append({"name": name, "version": version, "gives": gives, "remedy": remedy})
    program = shutil.which("mpirun")
    parts.append(
        {
            "name": "mpirun",
            "version": program,
            "gives": "moecomm bench --against mpi",
            "remedy": "install an MPI: apt install openmpi-bin",
        }
    )
    return [*parts, *gpu_parts()]
