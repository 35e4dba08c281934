"""Device code: one tile of rows times the matrix of an expert, with operands loaded in one of two ways.

By pointers, which is possible always; or by tensor descriptors (Hopper and later), where the copy engine brings whole
blocks and no register holds an address. What a descriptor reads beyond the rows of the expert is another expert's:
finite or not, it stays in rows and columns of the tile that are not kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["product_by_descriptors", "product_by_pointers"]


@triton.jit
def product_by_pointers(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    row_idx_ptr: tl.tensor,
    rows: tl.tensor,
    is_real: tl.tensor,
    columns: tl.tensor,
    expert: tl.tensor,
    num_steps: tl.tensor,
    num_source_rows: tl.tensor,
    num_inner: tl.tensor,
    num_columns: tl.tensor,
    stride_x: tl.tensor,
    stride_weight_expert: tl.tensor,
    stride_weight_inner: tl.tensor,
    stride_weight_column: tl.tensor,
    IS_PAIR: tl.constexpr,
    COMPUTE: tl.constexpr,
    EVEN_INNER: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Products of the rows with `columns` and, if IS_PAIR, with those `num_columns` further on."""
    is_column = columns < num_columns
    inner = tl.arange(0, BLOCK_INNER)
    source = rows
    is_read = is_real
    if row_idx_ptr is not None:
        source = tl.load(row_idx_ptr + rows, mask=is_real, other=-1).to(tl.int64)
        is_read = (source >= 0) & (source < num_source_rows)
    x_ptrs = x_ptr + source[:, None] * stride_x + inner[None, :]
    weight_ptrs = (
        weight_ptr
        + expert.to(tl.int64) * stride_weight_expert
        + inner[:, None].to(tl.int64) * stride_weight_inner
        + columns[None, :].to(tl.int64) * stride_weight_column
    )
    to_second = tl.cast(num_columns, tl.int64) * stride_weight_column
    step = tl.full((), BLOCK_INNER, tl.int64) * stride_weight_inner
    product = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    second = product
    for done in range(0, num_steps, BLOCK_INNER):
        if EVEN_INNER:
            x_mask = is_read[:, None]
            weight_mask = is_column[None, :]
        else:
            is_inner = inner < num_inner - done
            x_mask = is_read[:, None] & is_inner[None, :]
            weight_mask = is_inner[:, None] & is_column[None, :]
        x = tl.load(x_ptrs, mask=x_mask, other=0.0).to(COMPUTE)
        weight = tl.load(weight_ptrs, mask=weight_mask, other=0.0).to(COMPUTE)
        product = tl.dot(x, weight, product, input_precision="ieee")
        if IS_PAIR:
            weight = tl.load(weight_ptrs + to_second, mask=weight_mask, other=0.0).to(COMPUTE)
            second = tl.dot(x, weight, second, input_precision="ieee")
        x_ptrs += BLOCK_INNER
        weight_ptrs += step
    return product, second


@triton.jit
def product_by_descriptors(
    x: tl.tensor,
    weight: tl.tensor,
    first_row: tl.tensor,
    is_real: tl.tensor,
    first_column: tl.tensor,
    expert: tl.tensor,
    num_steps: tl.tensor,
    num_inner: tl.tensor,
    num_columns: tl.tensor,
    IS_PAIR: tl.constexpr,
    OF_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """As `product_by_pointers`; rows that are not real come out as zeros.

    Arguments:
        x: descriptor of `[N, K]`, blocks `[BLOCK_ROWS, BLOCK_INNER]`.
        weight: OF_COLUMNS: descriptor of `[E * K, M]`, blocks `[BLOCK_INNER, BLOCK_COLUMNS]`, K a multiple of
            BLOCK_INNER; otherwise of `[E * M, K]` (of a pair `[E * 2M, K]`), blocks `[BLOCK_COLUMNS, BLOCK_INNER]`.
    """
    product = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    second = product
    row = first_row.to(tl.int32)
    if OF_COLUMNS:
        weight_row = expert * num_inner
    elif IS_PAIR:
        weight_row = expert * (2 * num_columns) + first_column
    else:
        weight_row = expert * num_columns + first_column
    for done in range(0, num_steps, BLOCK_INNER):
        rows = x.load([row, done])
        if OF_COLUMNS:
            product = tl.dot(rows, weight.load([weight_row + done, first_column]), product)
        else:
            product = tl.dot(rows, weight.load([weight_row, done]).T, product)
        if IS_PAIR:
            second = tl.dot(rows, weight.load([weight_row + num_columns, done]).T, second)
    product = tl.where(is_real[:, None], product, 0.0)
    second = tl.where(is_real[:, None], second, 0.0)
    return product, second
