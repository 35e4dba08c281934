"""Rows back from where their routes lead, added up in registers in one pass.

T tokens   P num_slots   H columns
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.base import weights_dtype
from moecomm.kernels.triton.compile_case import CompileCase, varied
from moecomm.kernels.triton.rounding import TRITON_DTYPES, rounded, widened
from moecomm.kernels.triton.runtime import Addresses, alignment_of, launch, table_of
from moecomm.kernels.triton.tiles import extreme_numbers, numbers_of, route_pointers, row_pointers, tile_of

__all__ = ["combine_rows", "combine_rows_kernel", "compile_cases", "summed_rows"]


@triton.jit
def summed_rows(
    first: tl.tensor,
    first_weight: tl.tensor,
    num_slots: tl.int32,
    is_token: tl.tensor,
    c: tl.tensor,
    is_column: tl.tensor,
    addresses: tl.tensor,
    row_bytes: tl.int64,
    HAS_WEIGHTS: tl.constexpr,
    WIDE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """`[TOKENS, COLUMNS]`: the rows that routes name, summed over p in ascending order.

    Arguments:
        first, first_weight: `[TOKENS]` pointers to each token's first route and weight; num_slots of them follow.
        c: `[1, COLUMNS]`, where is_column.
    """
    total = tl.zeros((TOKENS, COLUMNS), dtype=WIDE)
    # Unrolled, so that the loads of several rows are on their way together; the sums keep their order.
    for p in tl.range(0, num_slots, loop_unroll_factor=4):
        route = tl.load(first + p, mask=is_token, other=-1)
        is_route = route >= 0
        place = route_pointers(route, addresses, row_bytes, DTYPE, ALIGNMENT)
        # The sum is never -0, so adding the 0 of an absent row leaves it as it is.
        row = tl.load(place + c, mask=is_route[:, None] & is_column, other=0.0)
        row = widened(row, WIDE)
        if HAS_WEIGHTS:
            weight = tl.load(first_weight + p, mask=is_route, other=0.0)
            total = total + weight[:, None] * row
        else:
            total = total + row
    return total


@triton.jit(do_not_specialize=["out", "num_tokens", "num_units", "num_slots"])
def combine_rows_kernel(
    out: tl.int64,
    num_tokens: tl.int64,
    num_units: tl.int32,
    routes: tl.tensor,
    num_slots: tl.int32,
    addresses: tl.tensor,
    weights: tl.tensor,
    HAS_WEIGHTS: tl.constexpr,
    WIDE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PER_UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Sums a tile of rows over p in ascending order.

    Arguments:
        out: address of `[T, H]`.
        num_units: ALIGNMENT bytes each, of a row.
        routes: `[T, num_slots]` int64.
        addresses: `[R]` int64.
        weights: `[T, num_slots]`, if HAS_WEIGHTS.
        WIDE: the dtype of weights and sums.
        DTYPE: of rows; PER_UNIT of them take ALIGNMENT bytes.
    """
    num_columns = num_units * PER_UNIT
    row_bytes = tl.cast(num_units, tl.int64) * ALIGNMENT
    num_pieces = tl.cdiv(num_columns, COLUMNS)
    program = tl.program_id(0)
    t = (program // num_pieces).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = ((program % num_pieces) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    is_token = t < num_tokens
    is_column = c < num_columns
    total = summed_rows(
        routes + t * num_slots,
        weights + t * num_slots,
        num_slots,
        is_token,
        c,
        is_column,
        addresses,
        row_bytes,
        HAS_WEIGHTS,
        WIDE,
        DTYPE,
        ALIGNMENT,
        TOKENS,
        COLUMNS,
    )
    target = tl.cast(out, tl.int64) + t * row_bytes
    tl.store(row_pointers(target, DTYPE, ALIGNMENT) + c, rounded(total, DTYPE), mask=is_token[:, None] & is_column)


def combine_rows(out: Tensor, routes: Tensor, addresses: Addresses, weights: Tensor | None) -> None:
    """As in `moecomm.kernels.base`; arguments are checked.

    Raises:
        ValueError: rows do not begin at multiples of their numbers' size.
    """
    num_tokens, num_slots = routes.shape
    row_bytes = out.shape[1] * out.element_size()
    table, known = table_of(addresses, routes, row_bytes)
    moves = numbers_of("a row", out.dtype, row_bytes, alignment_of(row_bytes, out.data_ptr(), known))
    tile = tile_of(num_tokens, moves, is_weighted=weights is not None)
    launch(
        combine_rows_kernel,
        tile.num_programs,
        out.device,
        *(out.data_ptr(), num_tokens, moves.num_units, routes, num_slots, table, table if weights is None else weights),
        HAS_WEIGHTS=weights is not None,
        WIDE=TRITON_DTYPES[weights_dtype(out.dtype)],
        DTYPE=moves.dtype,
        ALIGNMENT=moves.alignment,
        PER_UNIT=moves.per_unit,
        TOKENS=tile.tokens,
        COLUMNS=tile.columns,
    )


def compile_cases() -> list[CompileCase]:
    """Every dtype, plain and weighted."""
    cases: list[CompileCase] = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for row_bytes, num_tokens, has_weights in (
            (14336, 4096, False),
            (14336, 4096, True),
            (14336, 8, True),
            (512, 4096, True),
        ):
            wide = TRITON_DTYPES[weights_dtype(dtype)]
            moves = numbers_of("a row", dtype, row_bytes, 16)
            tile = tile_of(num_tokens, moves, is_weighted=has_weights)
            name = f"combine_rows {moves.dtype}{' weighted' if has_weights else ''}, {tile.columns} columns"
            if any(name == case.name for case in cases):
                continue  # few tokens and many take the same tile
            cases.append(
                CompileCase(
                    name=name,
                    kernel=combine_rows_kernel,
                    signature={
                        "out": "i64",
                        "num_tokens": "i64",
                        "num_units": "i32",
                        "routes": "*i64",
                        "num_slots": "i32",
                        "addresses": "*i64",
                        # Any pointer will do where there are none.
                        "weights": f"*{wide}" if has_weights else "*i64",
                        "HAS_WEIGHTS": "constexpr",
                        "WIDE": "constexpr",
                        "DTYPE": "constexpr",
                        "ALIGNMENT": "constexpr",
                        "PER_UNIT": "constexpr",
                        "TOKENS": "constexpr",
                        "COLUMNS": "constexpr",
                    },
                    constexprs={
                        "HAS_WEIGHTS": has_weights,
                        "WIDE": wide,
                        "DTYPE": moves.dtype,
                        "ALIGNMENT": moves.alignment,
                        "PER_UNIT": moves.per_unit,
                        "TOKENS": tile.tokens,
                        "COLUMNS": tile.columns,
                    },
                    moves_rows=True,
                )
            )
            if (row_bytes, num_tokens) == (14336, 4096):
                cases += varied(cases[-1], _extreme(dtype, has_weights))
    return cases


def _extreme(dtype: torch.dtype, has_weights: bool) -> list[dict[str, Any]]:
    """The tiles of the shortest rows, and of a single one of them."""
    tile = partial(tile_of, is_weighted=has_weights)
    return [extreme_numbers(dtype, partial(tile, num_tokens))[-1] for num_tokens in (4096, 1)]
