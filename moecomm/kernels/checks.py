"""Checks of tensor arguments; each names the argument, what it is and what is wanted."""

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


def check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Refuses a tensor that is not contiguous on the CPU with this dtype and shape."""
    if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous() or not tensor.is_cpu:
        _refuse(name, tensor, f"contiguous {dtype} {list(shape)} on cpu")


def check_matrix(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Refuses a tensor that is not a contiguous matrix on the CPU with this dtype."""
    if tensor.dtype is not dtype or tensor.dim() != 2 or not tensor.is_contiguous() or not tensor.is_cpu:
        _refuse(name, tensor, f"a contiguous matrix of {dtype} on cpu")


def format_number(name: str, dtype: torch.dtype) -> int:
    """Refuses a dtype that rows cannot be added in; gives its number in the native code."""
    number = FLOAT_FORMATS.get(dtype)
    if number is None:
        raise TypeError(f"{name} is {dtype}; wanted one of {', '.join(map(str, FLOAT_FORMATS))}")
    return number


def check_floating(name: str, tensor: Tensor) -> int:
    """Refuses a tensor that is not a contiguous matrix of a dtype rows can be added in; gives the dtype's number."""
    number = format_number(name, tensor.dtype)
    check_matrix(name, tensor, tensor.dtype)
    return number


def value_bytes(name: str, dtype: torch.dtype) -> int:
    """Refuses a dtype that values beside rows cannot have; gives the bytes of one."""
    if dtype is not torch.float32 and dtype is not torch.float64:
        raise TypeError(f"{name} is {dtype}; wanted torch.float32 or torch.float64")
    return dtype.itemsize


def check_values(name: str, tensor: Tensor, shape: tuple[int, ...]) -> int:
    """Refuses a tensor that is not contiguous float32 or float64 on the CPU with this shape; gives a value's bytes."""
    num_bytes = value_bytes(name, tensor.dtype)
    check_tensor(name, tensor, tensor.dtype, shape)
    return num_bytes


def check_ids(name: str, tensor: Tensor) -> Tensor:
    """Refuses a tensor that is not a matrix of int32 or int64 on the CPU; gives a contiguous one of the same values."""
    if (tensor.dtype is not torch.int64 and tensor.dtype is not torch.int32) or tensor.dim() != 2 or not tensor.is_cpu:
        _refuse(name, tensor, "a matrix of torch.int32 or torch.int64 on cpu")
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _refuse(name: str, tensor: Tensor, wanted: str) -> NoReturn:
    strides = "" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
    message = f"{name} is {tensor.dtype} {list(tensor.shape)}{strides} on {tensor.device}; wanted {wanted}"
    raise (TypeError if str(tensor.dtype) not in wanted else ValueError)(message)
