"""Tensor descriptors of the operands of the grouped GEMM: which tensors can be described, and how."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moecomm.kernels.triton.tile_shapes import TileShape

__all__ = ["describable", "describable_rows", "descriptors_of", "descriptors_of_rows"]

_ALIGNMENT = 16  # bytes
_INNER = 64  # elements of the inner dim that every shape with descriptors divides
_MAX_COORDINATE = 1 << 31


def describable(x: Tensor, weight: Tensor) -> str:
    """Which dim of the weight is contiguous, "inner" or "columns", if both tensors can be described; else "none".

    Arguments:
        x: `[N, K]`.
        weight: `[E, K, M]`, any strides.
    """
    num_experts, num_inner, num_columns = weight.shape
    if x.dtype != weight.dtype or x.element_size() != 2 or not x.numel() or not weight.numel():
        return "none"
    if not _is_describable(x) or max(x.shape[0], num_experts * max(num_inner, num_columns)) >= _MAX_COORDINATE:
        return "none"
    by_expert, by_inner, by_column = weight.stride()
    if by_inner == 1 and by_expert == num_columns * by_column and _is_aligned(weight, by_column):
        return "inner"
    # A block must not reach into the next expert, whose numbers would be added.
    if by_column == 1 and by_expert == num_inner * by_inner and _is_aligned(weight, by_inner):
        return "columns" if num_inner % _INNER == 0 else "none"
    return "none"


def descriptors_of(x: Tensor, weight: Tensor, shape: TileShape) -> tuple[Any, Any]:
    """Descriptors of describable tensors, see `product_by_descriptors`."""
    num_experts, num_inner, num_columns = weight.shape
    rows = TensorDescriptor(x, list(x.shape), list(x.stride()), [shape.rows, shape.inner])
    if describable(x, weight) == "inner":
        sizes, stride, block = [num_experts * num_columns, num_inner], weight.stride(2), [shape.columns, shape.inner]
    else:
        sizes, stride, block = [num_experts * num_inner, num_columns], weight.stride(1), [shape.inner, shape.columns]
    return rows, TensorDescriptor(weight, sizes, [stride, 1], block)


def describable_rows(left: Tensor, right: Tensor) -> bool:
    """Whether both operands of a weight gradient, `[N, M]` and `[N, K]`, can be described."""
    if left.dtype != right.dtype or left.element_size() != 2 or not left.numel() or not right.numel():
        return False
    return max(left.shape[0], right.shape[0]) < _MAX_COORDINATE and _is_describable(left) and _is_describable(right)


def descriptors_of_rows(left: Tensor, right: Tensor, shape: TileShape) -> tuple[Any, Any]:
    """Descriptors of describable rows, see `weight_gradient_kernel`."""
    first, second = (
        TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [shape.inner, width])
        for rows, width in ((left, shape.rows), (right, shape.columns))
    )
    return first, second


def _is_describable(rows: Tensor) -> bool:
    """Whether rows are contiguous, aligned, and do not overlap, as those of an expanded gradient do."""
    return rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1] and _is_aligned(rows, rows.stride(0))


def _is_aligned(tensor: Tensor, stride: int) -> bool:
    return tensor.data_ptr() % _ALIGNMENT == 0 and stride * tensor.element_size() % _ALIGNMENT == 0
