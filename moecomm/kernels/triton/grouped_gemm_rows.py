"""Device code: rows times the matrix of their expert, with what is done to the product while it is in registers.

N rows, E experts, K inner size, M columns. `out[n] = x[n] @ weight[e]` for the rows n of expert e, `weight` `[E, K, M]`
of any strides, so the same kernel gives outputs and data gradients. Products are summed in fp32.

EPILOGUE says what becomes of a tile:
    "plain"            out `[N, M]` = product
    "swiglu"           weight is `[E, K, 2M]`, gate then up; out `[N, M]` = silu(gate) * up; hidden `[N, 2M]` = gate, up
    "swiglu_backward"  product is the gradient of silu(gate) * up; out `[N, 2M]` = gradients of gate and up;
                       activation `[N, M]` = silu(gate) * up again; partial `[N, column tiles]` = what each tile adds to
                       the gradient of the row's weight
DESCRIPTORS says what `x_ptr` and `weight_ptr` are: "none" = pointers, otherwise tensor descriptors (see
`product_by_descriptors`) of a weight whose contiguous dim is "inner" or "columns".

A weight per row multiplies out and activation. Rows that are visited but not real come out as zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moecomm.kernels.triton.segments import locate, segment_bounds, tile_ends
from moecomm.kernels.triton.tile_products import product_by_descriptors, product_by_pointers

__all__ = ["multiply_rows_kernel"]


@triton.jit
def sigmoid_of(x: tl.tensor) -> tl.tensor:
    """Without an exponential that could overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def halves(tile: tl.tensor, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The left and the right half of the columns."""
    left, right = tl.split(tl.permute(tl.reshape(tile, (BLOCK_ROWS, 2, BLOCK_COLUMNS // 2)), (0, 2, 1)))
    return left, right


@triton.jit
def finish_tile(
    product: tl.tensor,
    up: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    is_real: tl.tensor,
    is_visited: tl.tensor,
    out_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    activation_ptr: tl.tensor,
    row_weights_ptr: tl.tensor,
    num_columns: tl.tensor,
    stride_out: tl.tensor,
    stride_hidden: tl.tensor,
    stride_activation: tl.tensor,
    EPILOGUE: tl.constexpr,
) -> tl.tensor:
    """Applies the epilogue and stores. Returns each row's part of the gradient of its weight (swiglu_backward)."""
    is_column = columns[None, :] < num_columns
    mask = is_visited[:, None] & is_column
    out_ptrs = out_ptr + rows[:, None] * stride_out + columns[None, :]
    if row_weights_ptr is not None:
        row_weights = tl.load(row_weights_ptr + rows, mask=is_real, other=0.0).to(tl.float32)[:, None]
    if hidden_ptr is not None:
        hidden_ptrs = hidden_ptr + rows[:, None] * stride_hidden + columns[None, :]
    partial = tl.zeros((product.shape[0],), tl.float32)
    if EPILOGUE == "swiglu":
        if hidden_ptr is not None:
            tl.store(hidden_ptrs, product.to(hidden_ptr.dtype.element_ty), mask=mask)
            tl.store(hidden_ptrs + num_columns, up.to(hidden_ptr.dtype.element_ty), mask=mask)
        product = product * sigmoid_of(product) * up
    if EPILOGUE == "swiglu_backward":
        is_kept = is_real[:, None] & is_column
        gate = tl.load(hidden_ptrs, mask=is_kept, other=0.0).to(tl.float32)
        up = tl.load(hidden_ptrs + num_columns, mask=is_kept, other=0.0).to(tl.float32)
        sigmoid = sigmoid_of(gate)
        silu = gate * sigmoid
        activation = silu * up
        partial = tl.sum(product * activation, 1)
        if row_weights_ptr is not None:
            product = product * row_weights
            activation = activation * row_weights
        if activation_ptr is not None:
            activation_ptrs = activation_ptr + rows[:, None] * stride_activation + columns[None, :]
            tl.store(activation_ptrs, activation.to(activation_ptr.dtype.element_ty), mask=mask)
        tl.store(out_ptrs + num_columns, (product * silu).to(out_ptr.dtype.element_ty), mask=mask)
        product = product * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    elif row_weights_ptr is not None:
        product = product * row_weights
    tl.store(out_ptrs, product.to(out_ptr.dtype.element_ty), mask=mask)
    return partial


@triton.jit(do_not_specialize=["num_experts", "num_rows", "num_source_rows", "capacity"])
def multiply_rows_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    activation_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    row_idx_ptr: tl.tensor,
    row_weights_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    num_experts: tl.tensor,
    num_rows: tl.tensor,
    num_source_rows: tl.tensor,
    capacity: tl.tensor,
    num_inner: tl.tensor,
    num_columns: tl.tensor,
    stride_x: tl.tensor,
    stride_weight_expert: tl.tensor,
    stride_weight_inner: tl.tensor,
    stride_weight_column: tl.tensor,
    stride_out: tl.tensor,
    stride_hidden: tl.tensor,
    stride_activation: tl.tensor,
    stride_partial: tl.tensor,
    EPILOGUE: tl.constexpr,
    COMPUTE: tl.constexpr,
    CLEARS_PADDING: tl.constexpr,
    CLEARS_TAIL: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    EVEN_INNER: tl.constexpr,
    SPLITS_COLUMNS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    tiles_across = (num_columns + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    ends = tile_ends(
        offsets_ptr,
        counts_ptr,
        num_experts,
        num_rows,
        capacity,
        tiles_across,
        BLOCK_EXPERTS,
        BLOCK_ROWS,
        CLEARS_PADDING,
        CLEARS_TAIL,
    )
    num_tiles = tl.max(ends, 0)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        expert = tl.sum((ends <= tile).to(tl.int32), 0)
        first_tile = tl.max(tl.where(ends <= tile, ends, 0), 0)
        begin, visited, count = segment_bounds(
            expert, offsets_ptr, counts_ptr, num_experts, num_rows, capacity, CLEARS_PADDING, CLEARS_TAIL
        )
        tiles_down = ((visited + BLOCK_ROWS - 1) // BLOCK_ROWS).to(tl.int32)
        row_tile, column_tile = locate(tile - first_tile, tiles_down, tiles_across, GROUP)

        places = row_tile.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        is_real = places < count
        is_visited = places < visited
        rows = begin + places
        columns = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        # A tile without a real row multiplies nothing and goes on to store its zeros.
        num_steps = tl.where(row_tile.to(tl.int64) * BLOCK_ROWS < count, num_inner, 0)
        if DESCRIPTORS == "none":
            product, up = product_by_pointers(
                x_ptr,
                weight_ptr,
                row_idx_ptr,
                rows,
                is_real,
                columns,
                expert,
                num_steps,
                num_source_rows,
                num_inner,
                num_columns,
                stride_x,
                stride_weight_expert,
                stride_weight_inner,
                stride_weight_column,
                EPILOGUE == "swiglu",
                COMPUTE,
                EVEN_INNER,
                BLOCK_INNER,
            )
        else:
            product, up = product_by_descriptors(
                x_ptr,
                weight_ptr,
                begin + row_tile * BLOCK_ROWS,
                is_real,
                column_tile * BLOCK_COLUMNS,
                expert,
                num_steps,
                num_inner,
                num_columns,
                EPILOGUE == "swiglu",
                DESCRIPTORS == "columns",
                BLOCK_ROWS,
                BLOCK_COLUMNS,
                BLOCK_INNER,
            )

        if SPLITS_COLUMNS:
            # Half a tile at a time needs half the registers.
            low, high = halves(product, BLOCK_ROWS, BLOCK_COLUMNS)
            up_low, up_high = halves(up, BLOCK_ROWS, BLOCK_COLUMNS)
            low_columns = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS // 2)
            partial = finish_tile(
                low,
                up_low,
                rows,
                low_columns,
                is_real,
                is_visited,
                out_ptr,
                hidden_ptr,
                activation_ptr,
                row_weights_ptr,
                num_columns,
                stride_out,
                stride_hidden,
                stride_activation,
                EPILOGUE,
            )
            partial += finish_tile(
                high,
                up_high,
                rows,
                low_columns + BLOCK_COLUMNS // 2,
                is_real,
                is_visited,
                out_ptr,
                hidden_ptr,
                activation_ptr,
                row_weights_ptr,
                num_columns,
                stride_out,
                stride_hidden,
                stride_activation,
                EPILOGUE,
            )
        else:
            partial = finish_tile(
                product,
                up,
                rows,
                columns,
                is_real,
                is_visited,
                out_ptr,
                hidden_ptr,
                activation_ptr,
                row_weights_ptr,
                num_columns,
                stride_out,
                stride_hidden,
                stride_activation,
                EPILOGUE,
            )
        if partial_ptr is not None:
            tl.store(partial_ptr + rows * stride_partial + column_tile, partial, mask=is_real)
