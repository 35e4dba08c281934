"""Finds the row kernels of a device by its name."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from moecomm.kernels.base import RowKernels

__all__ = ["available_kernels", "kernels_for"]

_KNOWN = {
    "cpu": ("moecomm.kernels.cpu", "CpuRowKernels"),
    "reference": ("moecomm.kernels.reference", "ReferenceRowKernels"),
}

_made: dict[str, RowKernels] = {}


def available_kernels() -> list[str]:
    """The names that `kernels_for` knows, sorted."""
    return sorted(_KNOWN)


def kernels_for(device_type: str) -> RowKernels:
    """The row kernels of a device.

    Arguments:
        device_type: "cpu" for the native ones, "reference" for the pure torch ones (CPU tensors, slow, for comparison).

    Raises:
        ValueError: the name is not known; the message lists those that are.
    """
    if device_type not in _made:
        if device_type not in _KNOWN:
            raise ValueError(
                f"device_type is {device_type!r}; there are row kernels for {', '.join(available_kernels())}"
            )
        module, name = _KNOWN[device_type]
        _made[device_type] = cast(RowKernels, getattr(import_module(module), name)())
    return _made[device_type]
