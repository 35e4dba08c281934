"""What a caller may pass: each mistake is a ValueError or TypeError that names the argument and both values."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

import torch

from moecomm.handle import Handle

__all__ = [
    "SUMMABLE",
    "Found",
    "check_capacity",
    "check_combine",
    "check_dispatch",
    "check_handle",
    "check_layout",
    "check_numbers",
    "check_sizes",
    "look_of",
]

T = TypeVar("T")

_LAYOUTS = {"throughput": ("expert_major", "flat"), "low_latency": ("slab", "expert_major")}
SUMMABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of rows that can be summed, and so have gradients."""


def look_of(tensor: Any) -> object:
    """All of an argument that the checks look at, to be used as a key; None for None."""
    if isinstance(tensor, torch.Tensor):
        return tensor.shape, tensor.dtype, tensor.device
    return None if tensor is None else object()  # like nothing that was seen before


class Found(dict[Hashable, T]):
    """What the checks found for arguments that look alike, so that they are made once; forgets all when it is full."""

    _MOST = 4096

    def keep(self, looks: Hashable, found: T) -> T:
        """Notes what was found; gives it."""
        if len(self) >= self._MOST:
            self.clear()
        self[looks] = found
        return found


def _check_matrix(name: str, tensor: Any, shape: str, device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor {shape}, got {type(tensor).__name__}")
    if tensor.dim() != 2:
        raise ValueError(f"{name} must be {shape}, got shape {list(tensor.shape)}")
    if tensor.device != device:
        raise TypeError(
            f"{name} is on {tensor.device}, this communicator carries tensors on {device}; construct it with "
            f"device={str(tensor.device)!r}, or move the tensor"
        )


def check_layout(layout: str, expert_alignment: int, mode: str, capacity: int | None) -> None:
    """Checks the options of a dispatch."""
    if mode not in list(_LAYOUTS):  # which compares, as the mode may not be hashable
        raise ValueError(f"mode: unknown {mode!r}; available: {', '.join(_LAYOUTS)}")
    if layout not in _LAYOUTS[mode]:
        raise ValueError(f"layout: {layout!r} is not one of mode {mode!r}; available: {', '.join(_LAYOUTS[mode])}")
    check_numbers(expert_alignment, capacity)
    if not 1 <= expert_alignment <= 2**20:
        raise ValueError(f"expert_alignment must be in [1, {2**20}], got {expert_alignment}")
    if layout == "flat" and expert_alignment != 1:
        raise ValueError(
            f"expert_alignment must be 1 with layout 'flat' (rows are not grouped), got {expert_alignment}"
        )
    if capacity is None:
        return
    if mode != "throughput":
        raise ValueError(
            f"capacity must be None in mode {mode!r}, whose shapes follow from the Communicator's arguments, got "
            f"{capacity}"
        )
    if not expert_alignment <= capacity < 2**31:
        raise ValueError(
            f"capacity must be in [{expert_alignment}, {2**31 - 1}] (a route takes expert_alignment), got {capacity}"
        )


def check_numbers(expert_alignment: Any, capacity: Any) -> None:
    """Checks the types of a dispatch's numbers."""
    if isinstance(expert_alignment, bool) or not isinstance(expert_alignment, int):
        raise TypeError(f"expert_alignment must be an int, got {type(expert_alignment).__name__}")
    if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int)):
        raise TypeError(f"capacity must be an int or None, got {type(capacity).__name__}")


def check_capacity(capacity: int, handle: Handle) -> None:
    """Checks the capacity that is given beside a handle, which has its own."""
    check_numbers(1, capacity)
    if handle.mode != "throughput" or capacity != handle.capacity:
        kept = f"capacity {handle.capacity}" if handle.capacity else "none"
        raise ValueError(
            f"capacity is {capacity}, the handle is of a {handle.mode} dispatch with {kept}; rows that go the same way "
            "arrive in the same shape, so leave it out"
        )


def check_handle(handle: Any, communicator: int) -> None:
    """Checks that a handle is this communicator's."""
    if not isinstance(handle, Handle):
        raise TypeError(f"handle must be a Handle (received.handle of a dispatch), got {type(handle).__name__}")
    if handle.communicator != communicator:
        raise ValueError(
            f"handle: made by communicator {handle.communicator}, used with communicator {communicator}; "
            "a handle holds the routing of the communicator that made it"
        )


def check_dispatch(
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    *,
    hidden: int,
    max_topk: int,
    device: torch.device,
    num_tokens: int | None = None,
) -> None:
    """Checks x `[T, H]`, topk_idx `[T, K]` and topk_weights `[T, K]` or None against each other and the sizes."""
    _check_matrix("x", x, "[num_tokens, hidden]", device)
    if x.shape[1] != hidden:
        raise ValueError(f"x has hidden size {x.shape[1]}, the communicator was made for hidden={hidden}")
    if num_tokens is not None and x.shape[0] != num_tokens:
        raise ValueError(f"x has {x.shape[0]} tokens, the handle was made for {num_tokens}")
    _check_matrix("topk_idx", topk_idx, "[num_tokens, num_topk]", device)
    if topk_idx.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_idx must be int32 or int64, got {topk_idx.dtype}")
    if topk_idx.shape[0] != x.shape[0]:
        raise ValueError(f"topk_idx has {topk_idx.shape[0]} tokens, x has {x.shape[0]}")
    if not 1 <= topk_idx.shape[1] <= max_topk:
        raise ValueError(f"topk_idx has num_topk {topk_idx.shape[1]}, the communicator allows 1 to {max_topk}")
    if topk_weights is not None:
        _check_weights(topk_weights, topk_idx.shape, device)


def _check_weights(topk_weights: Any, shape: torch.Size, device: torch.device) -> None:
    _check_matrix("topk_weights", topk_weights, "[num_tokens, num_topk]", device)
    if topk_weights.shape != shape:
        raise ValueError(f"topk_weights has shape {list(topk_weights.shape)}, topk_idx has {list(shape)}")
    if topk_weights.dtype not in SUMMABLE:
        raise TypeError(f"topk_weights must be floating point ({_names()}), got {topk_weights.dtype}")


def check_combine(y: Any, topk_weights: Any, *, handle: Handle, hidden: int, device: torch.device) -> None:
    """Checks y `[N, H]` (slab: also `[E_local, capacity, H]`) and topk_weights `[T, K]` or None against the handle."""
    num_rows, capacity, layout = handle.num_rows, handle.routing.capacity, handle.routing.layout
    slabs = (num_rows // capacity, capacity, hidden) if layout == "slab" else None
    if slabs is None or not isinstance(y, torch.Tensor) or y.shape != slabs or y.device != device:
        shape = "[num_rows, hidden]" if slabs is None else f"[num_rows, hidden] or {list(slabs)}"
        _check_matrix("y", y, shape, device)
        if y.shape[0] != num_rows:
            raise ValueError(f"y has {y.shape[0]} rows, the dispatch of this handle brought {num_rows}")
        if y.shape[1] != hidden:
            raise ValueError(f"y has hidden size {y.shape[1]}, the communicator was made for hidden={hidden}")
    if y.dtype not in SUMMABLE:
        raise TypeError(f"y: rows of dtype {y.dtype} cannot be summed; supported: {_names()}")
    if topk_weights is None:
        return
    if layout == "flat":
        raise ValueError(
            "topk_weights: with layout 'flat' each row is already the weighted sum over its rank's experts; "
            "apply received.topk_weights there and combine without weights"
        )
    _check_weights(topk_weights, handle.routing.topk_idx.shape, device)


def _names() -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in SUMMABLE)


def check_sizes(**sizes: tuple[int, int | None]) -> None:
    """Checks the sizes of a communicator: name=(value, largest or None)."""
    for name, (value, most) in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        if value < 1 or (most is not None and value > most):
            allowed = "at least 1" if most is None else f"from 1 to {most}"
            raise ValueError(f"{name} must be {allowed}, got {value}")
