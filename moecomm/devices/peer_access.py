"""Which GPUs of this process can address each other's memory, and add to it atomically, as signals between them do."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

__all__ = ["reaches"]

_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


def reaches(index: int, other: int) -> bool:
    """Whether kernels of a GPU can store to, load from and signal in the memory of another; both are indices of torch.

    Over NVLink they can. Over PCIe there may be access without atomics: then a signal would not arrive.
    """
    if index == other:
        return True
    return bool(torch.cuda.can_device_access_peer(index, other)) and _has_atomics(index, other)


def _has_atomics(index: int, other: int) -> bool:
    """What the driver says, for which torch and CuPy have no call; where it cannot be asked, that they are there."""
    driver = _driver()
    if driver is None:
        return True
    devices = (ctypes.c_int(), ctypes.c_int())
    for device, ordinal in zip(devices, (index, other), strict=True):
        if driver.cuDeviceGet(ctypes.byref(device), ordinal) != 0:
            return True
    found = ctypes.c_int()
    if driver.cuDeviceGetP2PAttribute(ctypes.byref(found), _NATIVE_ATOMICS, *devices) != 0:
        return True
    return found.value != 0


@functools.cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None
