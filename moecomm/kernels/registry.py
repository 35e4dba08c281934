"""Finds kernels by name, and those that communicators use.

MOECOMM_KERNELS in the environment names what communicators use instead of the kernels of the device, to run them whole
on another implementation: `MOECOMM_KERNELS=triton TRITON_INTERPRET=1`. All give the same bits, so ranks may differ.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, cast

from moecomm.kernels.base import RowKernels
from moecomm.kernels.captured import CapturedKernels
from moecomm.kernels.eager import EagerKernels
from moecomm.kernels.experts import ExpertKernels
from moecomm.kernels.signals import SignalKernels, WireKernels

__all__ = [
    "available_kernels",
    "captured_kernels_for",
    "chosen_eager_kernels",
    "chosen_kernels",
    "eager_kernels_for",
    "expert_kernels_for",
    "kernels_for",
    "signal_kernels_for",
    "wire_kernels_for",
]

_VARIABLE = "MOECOMM_KERNELS"
_KNOWN = {
    "cpu": ("moecomm.kernels.cpu", "CpuRowKernels"),
    "reference": ("moecomm.kernels.reference", "ReferenceRowKernels"),
    "triton": ("moecomm.kernels.triton.rows", "TritonRowKernels"),
}
_KNOWN_EAGER = {
    "cpu": ("moecomm.kernels.cpu_eager", "CpuEagerKernels"),
    "reference": ("moecomm.kernels.reference_eager", "ReferenceEagerKernels"),
    "triton": ("moecomm.kernels.triton.eager", "TritonEagerKernels"),
}
_KNOWN_CAPTURED = {
    "triton": ("moecomm.kernels.triton.captured_kernels", "TritonCapturedKernels"),
}
_KNOWN_SIGNALS = {
    "triton": ("moecomm.kernels.triton.stream_signals", "TritonSignalKernels"),
}
_KNOWN_WIRE = {
    "triton": ("moecomm.kernels.triton.stream_signals", "TritonWireKernels"),
}
_KNOWN_EXPERTS = {
    "torch": ("moecomm.kernels.torch_experts", "TorchExpertKernels"),
    "triton": ("moecomm.kernels.triton.grouped_swiglu", "TritonExpertKernels"),
}

_made: dict[tuple[str, str], Any] = {}


def available_kernels() -> list[str]:
    """The names that `kernels_for` and `eager_kernels_for` know, sorted."""
    return sorted(_KNOWN)


def kernels_for(device_type: str) -> RowKernels:
    """The row kernels of a device.

    Arguments:
        device_type: "cpu" for the native ones, "reference" for the pure torch ones (CPU tensors, slow, for comparison),
            "triton" for CUDA tensors; those take CPU tensors (slow, for tests) if TRITON_INTERPRET=1 is set before
            Triton is imported.

    Raises:
        ValueError: the name is not known; the message lists those that are.
        ImportError: Triton is not installed.
    """
    return cast(RowKernels, _make(device_type, _KNOWN))


def eager_kernels_for(device_type: str) -> EagerKernels:
    """The low-latency kernels of a device; as `kernels_for`."""
    return cast(EagerKernels, _make(device_type, _KNOWN_EAGER))


def expert_kernels_for(name: str) -> ExpertKernels:
    """What computes the experts.

    Arguments:
        name: "torch" for torch's grouped product, "triton" for our own.

    Raises:
        ValueError: the name is not known.
        ImportError: a package that it needs is missing.
    """
    return cast(ExpertKernels, _make(name, _KNOWN_EXPERTS))


def captured_kernels_for(name: str) -> CapturedKernels:
    """Low-latency calls that a device makes by itself; as `kernels_for`, of which only "triton" has them."""
    return cast(CapturedKernels, _make(name, _KNOWN_CAPTURED))


def signal_kernels_for(name: str) -> SignalKernels:
    """Signals between devices; as `kernels_for`, of which only "triton" has them."""
    return cast(SignalKernels, _make(name, _KNOWN_SIGNALS))


def wire_kernels_for(name: str) -> WireKernels:
    """Puts and signals between devices that cannot address each other; as `signal_kernels_for`."""
    return cast(WireKernels, _make(name, _KNOWN_WIRE))


def chosen_kernels(device_type: str) -> RowKernels:
    """The row kernels that communicators use for tensors on a device; read from the environment at each call.

    Raises:
        ValueError: MOECOMM_KERNELS names none.
        ImportError: Triton is not installed.
    """
    return kernels_for(_chosen(device_type))


def chosen_eager_kernels(device_type: str) -> EagerKernels:
    """The low-latency kernels that communicators use; as `chosen_kernels`."""
    return eager_kernels_for(_chosen(device_type))


def _chosen(device_type: str) -> str:
    name = os.environ.get(_VARIABLE, device_type)
    if name not in _KNOWN:
        raise ValueError(f"{_VARIABLE} is {name!r}; there are kernels for {', '.join(available_kernels())}")
    return name


def _make(device_type: str, known: dict[str, tuple[str, str]]) -> Any:
    if device_type not in known:
        raise ValueError(f"device_type is {device_type!r}; there are kernels for {', '.join(sorted(known))}")
    where = known[device_type]
    if where not in _made:
        module, name = where
        try:
            found = import_module(module)
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise ImportError(f"the kernels {device_type!r} need Triton: pip install triton") from error
        _made[where] = getattr(found, name)()
    return _made[where]
