"""Devices by what users call them. What a device needs is imported when it is asked for."""

from __future__ import annotations

from typing import Any

import torch

from moecomm.devices.base import Device
from moecomm.devices.host import HostDevice

__all__ = ["find_device"]


def find_device(device: Any) -> Device:
    """The device of a communicator's tensors.

    Arguments:
        device: a torch device or its name, a `Device`, or None: the CPU.

    Raises:
        TypeError: it is none of these.
        ValueError: there is no such device, or nothing here works on it.
        TransportUnavailable: it is there, but what works on it is not installed.
    """
    if isinstance(device, Device):
        return device
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"device: {device!r} is no torch device: {error}") from error
    if device is None:
        return HostDevice()
    if not isinstance(device, torch.device):
        raise TypeError(f"device must be a torch.device, its name or None, got {type(device).__name__}")
    if device.type == "cpu":
        return HostDevice()
    if device.type == "cuda":
        from moecomm.devices.cuda import CudaDevice

        return CudaDevice(device)
    raise ValueError(f"device: tensors on {device.type!r} cannot be exchanged; cpu and cuda can")
