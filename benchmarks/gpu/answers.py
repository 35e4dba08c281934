"""Answers held to what is right: elements that differ, by bits or by a tolerance."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["poisoned", "wrong_bits", "wrong_sums"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POISON = 0xA5


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory full of NaN, or of 0xA5 for integers."""
    if dtype.is_floating_point:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((num_bytes,), _POISON, dtype=torch.uint8, device=device).view(dtype).view(shape)


def wrong_bits(got: Tensor | None, want: Tensor | None) -> int:
    """Elements whose bits differ; all, and at least one, where dtype or shape do."""
    if got is None or want is None:
        return int(got is not want)
    if got.dtype is not want.dtype or got.shape != want.shape:
        return max(1, want.numel())
    bits = _BITS[got.element_size()]
    got = got.detach().to(want.device).contiguous().view(bits)
    return int((got != want.detach().contiguous().view(bits)).sum())


def wrong_sums(got: Tensor, want: Tensor, *, relative: float, absolute: float) -> int:
    """Elements that are further from `want` than rounding explains.

    Arguments:
        relative: of the element, for the rounding of the result.
        absolute: of the root mean square of `want`, for roundings before the sum.
    """
    if got.shape != want.shape:
        return max(1, want.numel())
    if want.numel() == 0:
        return 0
    wide = want.dtype if want.dtype is torch.float64 else torch.float32
    want, got = want.detach().to(wide), got.detach().to(want.device, wide)
    scale = want.square().mean().sqrt()
    is_right = (got - want).abs_() <= relative * want.abs() + absolute * scale
    return want.numel() - int(is_right.sum())
