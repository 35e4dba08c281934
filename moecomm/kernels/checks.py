"""Checks of tensor arguments; each names the argument, what it is and what is wanted.

`device` is where a tensor must be; None = the CPU.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

__all__ = [
    "FLOAT_FORMATS",
    "check_floating",
    "check_ids",
    "check_matrix",
    "check_tensor",
    "check_values",
    "format_number",
    "value_bytes",
]

FLOAT_FORMATS = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""The dtypes that rows can be added in, with their numbers in the native code."""


def check_tensor(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device | None = None
) -> None:
    """Refuses a tensor that is not contiguous on the device with this dtype and shape."""
    is_there = tensor.is_cpu if device is None else tensor.device == device
    if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous() or not is_there:
        _refuse(name, tensor, f"contiguous {dtype} {list(shape)}", device)


def check_matrix(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> None:
    """Refuses a tensor that is not a contiguous matrix on the device with this dtype."""
    is_there = tensor.is_cpu if device is None else tensor.device == device
    if tensor.dtype is not dtype or tensor.dim() != 2 or not tensor.is_contiguous() or not is_there:
        _refuse(name, tensor, f"a contiguous matrix of {dtype}", device)


def format_number(name: str, dtype: torch.dtype) -> int:
    """Refuses a dtype that rows cannot be added in; gives its number in the native code."""
    number = FLOAT_FORMATS.get(dtype)
    if number is None:
        raise TypeError(f"{name} is {dtype}; wanted one of {', '.join(map(str, FLOAT_FORMATS))}")
    return number


def check_floating(name: str, tensor: Tensor, device: torch.device | None = None) -> int:
    """Refuses a tensor that is not a contiguous matrix of a dtype rows can be added in; gives the dtype's number."""
    number = format_number(name, tensor.dtype)
    check_matrix(name, tensor, tensor.dtype, device)
    return number


def value_bytes(name: str, dtype: torch.dtype) -> int:
    """Refuses a dtype that values beside rows cannot have; gives the bytes of one."""
    if dtype is not torch.float32 and dtype is not torch.float64:
        raise TypeError(f"{name} is {dtype}; wanted torch.float32 or torch.float64")
    return dtype.itemsize


def check_values(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device | None = None) -> int:
    """Refuses a tensor that is not contiguous float32 or float64 on the device with this shape; gives bytes of one."""
    num_bytes = value_bytes(name, tensor.dtype)
    check_tensor(name, tensor, tensor.dtype, shape, device)
    return num_bytes


def check_ids(name: str, tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Refuses a tensor that is not a matrix of int32 or int64 on the device; gives it contiguous."""
    is_there = tensor.is_cpu if device is None else tensor.device == device
    if (tensor.dtype is not torch.int64 and tensor.dtype is not torch.int32) or tensor.dim() != 2 or not is_there:
        _refuse(name, tensor, "a matrix of torch.int32 or torch.int64", device)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _refuse(name: str, tensor: Tensor, wanted: str, device: torch.device | None) -> NoReturn:
    strides = "" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
    message = f"{name} is {tensor.dtype} {list(tensor.shape)}{strides} on {tensor.device}"
    kind = TypeError if str(tensor.dtype) not in wanted else ValueError
    raise kind(f"{message}; wanted {wanted} on {device or 'cpu'}")
