"""Comparisons that say where two tensors differ and by what."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["assert_bitwise_equal", "expect"]


def expect(condition: bool, message: str) -> None:
    """Raises AssertionError with `message` unless `condition` holds; unlike `assert`, also under `python -O`."""
    if not condition:
        raise AssertionError(message)


def assert_bitwise_equal(actual: Tensor | None, expected: Tensor | None, what: str) -> None:
    """Raises AssertionError unless both have the same shape, dtype and bits (any NaN equals any NaN), or are None.

    Arguments:
        actual: what was computed.
        expected: what is right.
        what: its name, for the message, which says how many elements differ, where the first is, and both values.
    """
    if actual is None or expected is None:
        expect(actual is expected, f"{what}: got {_shape(actual)}, expected {_shape(expected)}")
        return
    expect(
        actual.shape == expected.shape and actual.dtype == expected.dtype,
        f"{what}: got {_shape(actual)}, expected {_shape(expected)}",
    )
    if actual.numel() == 0:
        return
    differs = (_bits(actual) != _bits(expected)).reshape(*actual.shape, -1).any(dim=-1)
    if actual.dtype.is_floating_point:
        differs &= ~(_wide(actual).isnan() & _wide(expected).isnan())
    if bool(differs.any()):
        first = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {differs.numel()} elements differ; the first at {list(first)}: "
            f"got {_wide(actual)[first].item()!r}, expected {_wide(expected)[first].item()!r}"
        )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().unsqueeze(-1).view(torch.uint8)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float64) if tensor.dtype.is_floating_point else tensor


def _shape(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
