"""Device code: the gradient of every expert's matrix, a sum over the expert's rows.

`out[e] = left[rows of e].T @ right[rows of e]`, `left` `[N, M]`, `right` `[N, K]`, `out` `[E, M, K]`, summed in fp32 in
ascending order of rows by one program per tile, so that the sum is the same every time. Padding is not read. An expert
without rows gets zeros. Descriptors of `left` and `right`, if given, are how whole blocks of rows are loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moecomm.kernels.triton.segments import locate, segment_bounds

__all__ = ["weight_gradient_kernel"]


@triton.jit(do_not_specialize=["num_experts", "num_rows", "num_source_rows", "capacity"])
def weight_gradient_kernel(
    left_ptr: tl.tensor,
    right_ptr: tl.tensor,
    out_ptr: tl.tensor,
    left_blocks: tl.tensor,
    right_blocks: tl.tensor,
    row_idx_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    num_experts: tl.tensor,
    num_rows: tl.tensor,
    num_source_rows: tl.tensor,
    capacity: tl.tensor,
    num_left: tl.tensor,
    num_right: tl.tensor,
    stride_left: tl.tensor,
    stride_right: tl.tensor,
    stride_out_expert: tl.tensor,
    stride_out: tl.tensor,
    COMPUTE: tl.constexpr,
    REST_STAGES: tl.constexpr,
    BLOCK_LEFT: tl.constexpr,
    BLOCK_RIGHT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    tiles_down = (num_left + BLOCK_LEFT - 1) // BLOCK_LEFT
    tiles_across = (num_right + BLOCK_RIGHT - 1) // BLOCK_RIGHT
    per_expert = tiles_down * tiles_across
    for tile in range(tl.program_id(0), num_experts * per_expert, tl.num_programs(0)):
        expert = tile // per_expert
        down, across = locate(tile % per_expert, tiles_down, tiles_across, GROUP)
        begin, _, count = segment_bounds(expert, offsets_ptr, counts_ptr, num_experts, num_rows, capacity, False, False)
        left = down * BLOCK_LEFT + tl.arange(0, BLOCK_LEFT)
        right = across * BLOCK_RIGHT + tl.arange(0, BLOCK_RIGHT)
        is_left = left < num_left
        is_right = right < num_right
        total = tl.zeros((BLOCK_LEFT, BLOCK_RIGHT), tl.float32)
        num_whole = 0
        if left_blocks is not None:
            # Whole blocks of rows; what is left of the last one is read by pointers, which can be masked.
            num_whole = (count // BLOCK_ROWS * BLOCK_ROWS).to(tl.int32)
            first_row = begin.to(tl.int32)
            for done in range(0, num_whole, BLOCK_ROWS):
                lefts = left_blocks.load([first_row + done, down * BLOCK_LEFT])
                rights = right_blocks.load([first_row + done, across * BLOCK_RIGHT])
                total = tl.dot(lefts.T, rights, total)
        places = tl.arange(0, BLOCK_ROWS)
        rows = begin + num_whole + places
        left_ptrs = left_ptr + rows[:, None] * stride_left + left[None, :]
        right_ptrs = right_ptr + rows[:, None] * stride_right + right[None, :]
        left_step = tl.full((), BLOCK_ROWS, tl.int64) * stride_left
        right_step = tl.full((), BLOCK_ROWS, tl.int64) * stride_right
        for done in tl.range(num_whole, count.to(tl.int32), BLOCK_ROWS, num_stages=REST_STAGES):
            is_real = places < count - done
            if row_idx_ptr is not None:
                source = tl.load(row_idx_ptr + begin + done + places, mask=is_real, other=-1).to(tl.int64)
                is_read = (source >= 0) & (source < num_source_rows)
                right_ptrs = right_ptr + source[:, None] * stride_right + right[None, :]
            else:
                is_read = is_real
            lefts = tl.load(left_ptrs, mask=is_real[:, None] & is_left[None, :], other=0.0).to(COMPUTE)
            rights = tl.load(right_ptrs, mask=is_read[:, None] & is_right[None, :], other=0.0).to(COMPUTE)
            total = tl.dot(tl.trans(lefts), rights, total, input_precision="ieee")
            left_ptrs += left_step
            if row_idx_ptr is None:
                right_ptrs += right_step
        out_ptrs = (
            out_ptr + expert.to(tl.int64) * stride_out_expert + left[:, None].to(tl.int64) * stride_out + right[None, :]
        )
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_left[:, None] & is_right[None, :])
