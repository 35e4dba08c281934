"""Rows to where their routes lead: each is read once and stored to all its places, as it is or scaled.

T tokens   P num_slots   H columns
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.base import weights_dtype
from moecomm.kernels.cuda.push_bulk import launch_bulk_push
from moecomm.kernels.triton.compile_case import CompileCase, varied
from moecomm.kernels.triton.lanes import unless_failed
from moecomm.kernels.triton.push_engines import PushCase, engines
from moecomm.kernels.triton.rounding import TRITON_DTYPES, rounded, widened
from moecomm.kernels.triton.runtime import Addresses, alignment_of, launch, table_of
from moecomm.kernels.triton.tiles import (
    extreme_moves,
    extreme_numbers,
    moves_of,
    numbers_of,
    route_pointers,
    row_pointers,
    tile_of,
)

__all__ = [
    "compile_cases",
    "push_address_rows",
    "push_rows",
    "push_rows_kernel",
    "push_weighted_rows",
    "push_weighted_rows_kernel",
]

_UNLESS_FAILED = ", unless a wait has failed"


@triton.jit(do_not_specialize=["rows", "row_stride", "num_tokens", "num_units", "num_slots"])
def push_rows_kernel(
    rows: tl.int64,
    row_stride: tl.int64,
    sources: tl.tensor,
    num_tokens: tl.int64,
    num_units: tl.int32,
    routes: tl.tensor,
    num_slots: tl.int32,
    addresses: tl.tensor,
    status: tl.tensor,
    HAS_SOURCES: tl.constexpr,
    HAS_STATUS: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PER_UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Copies a tile of rows, each to all its places.

    Arguments:
        rows, row_stride: address of row 0 and bytes between rows; unused if HAS_SOURCES.
        sources: `[T]` int64 address of each row, if HAS_SOURCES; tokens with 0 have none and go nowhere.
        num_units: ALIGNMENT bytes each, of a row.
        routes: `[T, num_slots]` int64.
        addresses: `[R]` int64.
        status: as in `lanes.unless_failed`, if HAS_STATUS: once a wait has failed nothing is written.
        DTYPE: an integer; PER_UNIT of them take ALIGNMENT bytes.
    """
    if HAS_STATUS:
        num_slots = unless_failed(status, num_slots)  # not tokens, whose masks would take registers
    num_columns = num_units * PER_UNIT
    row_bytes = tl.cast(num_units, tl.int64) * ALIGNMENT
    num_pieces = tl.cdiv(num_columns, COLUMNS)
    program = tl.program_id(0)
    t = (program // num_pieces).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = ((program % num_pieces) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    is_token = t < num_tokens
    is_column = c < num_columns
    if HAS_SOURCES:
        source = tl.load(sources + t, mask=is_token, other=0)
        is_token &= source != 0
    else:
        source = tl.cast(rows, tl.int64) + t * row_stride
    piece = tl.load(
        row_pointers(source, DTYPE, ALIGNMENT) + c,
        mask=is_token[:, None] & is_column,
        eviction_policy="evict_first",
    )
    first = routes + t * num_slots
    for p in range(num_slots):
        route = tl.load(first + p, mask=is_token, other=-1)
        is_route = route >= 0
        place = route_pointers(route, addresses, row_bytes, DTYPE, ALIGNMENT)
        tl.store(place + c, piece, mask=is_route[:, None] & is_column)


@triton.jit(do_not_specialize=["rows", "row_stride", "num_tokens", "num_units", "num_slots"])
def push_weighted_rows_kernel(
    rows: tl.int64,
    row_stride: tl.int64,
    num_tokens: tl.int64,
    num_units: tl.int32,
    routes: tl.tensor,
    num_slots: tl.int32,
    addresses: tl.tensor,
    weights: tl.tensor,
    status: tl.tensor,
    HAS_STATUS: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PER_UNIT: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Stores weight * row at each place. `weights` `[T, num_slots]` fp32 or fp64; the rest as in `push_rows_kernel`."""
    if HAS_STATUS:
        num_slots = unless_failed(status, num_slots)
    num_columns = num_units * PER_UNIT
    row_bytes = tl.cast(num_units, tl.int64) * ALIGNMENT
    num_pieces = tl.cdiv(num_columns, COLUMNS)
    program = tl.program_id(0)
    t = (program // num_pieces).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = ((program % num_pieces) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    is_token = t < num_tokens
    is_column = c < num_columns
    source = tl.cast(rows, tl.int64) + t * row_stride
    piece = tl.load(
        row_pointers(source, DTYPE, ALIGNMENT) + c,
        mask=is_token[:, None] & is_column,
        eviction_policy="evict_first",
    )
    piece = widened(piece, weights.dtype.element_ty)
    first = routes + t * num_slots
    first_weight = weights + t * num_slots
    for p in range(num_slots):
        route = tl.load(first + p, mask=is_token, other=-1)
        is_route = route >= 0
        weight = tl.load(first_weight + p, mask=is_route, other=0.0)
        place = route_pointers(route, addresses, row_bytes, DTYPE, ALIGNMENT)
        scaled = rounded(weight[:, None] * piece, DTYPE)
        tl.store(place + c, scaled, mask=is_route[:, None] & is_column)


def push_rows(rows: Tensor, routes: Tensor, addresses: Addresses, status: Tensor | None = None) -> None:
    """As in `moecomm.kernels.base`; arguments are checked. `status`: once a wait has failed nothing is written.

    On devices that have it the bulk copy engine takes what it is faster at; see `push_engines`.
    """
    num_tokens, num_slots = routes.shape
    row_bytes = rows.shape[1] * rows.element_size()
    stride = rows.stride(0) * rows.element_size()
    table, known = table_of(addresses, routes, row_bytes)
    alignment = alignment_of(row_bytes, stride, rows.data_ptr(), known)
    case = PushCase(routes.device, num_tokens, num_slots, row_bytes, table.numel())
    if engines.serve(case, alignment):
        launches = {
            "triton": lambda: _push_rows(rows, routes, table, alignment, status),
            "bulk": lambda: launch_bulk_push(rows, routes, table, status=status),
        }
        engines.run(case, launches)
    else:
        _push_rows(rows, routes, table, alignment, status)


def _push_rows(rows: Tensor, routes: Tensor, table: Tensor, alignment: int, status: Tensor | None) -> None:
    num_tokens, num_slots = routes.shape
    moves = moves_of(rows.shape[1] * rows.element_size(), alignment)
    stride = rows.stride(0) * rows.element_size()
    tile = tile_of(num_tokens, moves)
    launch(
        push_rows_kernel,
        tile.num_programs,
        routes.device,
        *(rows.data_ptr(), stride, table, num_tokens, moves.num_units, routes, num_slots, table),
        table if status is None else status,
        HAS_SOURCES=False,
        HAS_STATUS=status is not None,
        DTYPE=moves.dtype,
        ALIGNMENT=moves.alignment,
        PER_UNIT=moves.per_unit,
        TOKENS=tile.tokens,
        COLUMNS=tile.columns,
    )


def push_address_rows(sources: Tensor, alignment: int, row_bytes: int, routes: Tensor, addresses: Addresses) -> None:
    """Pushes rows that lie anywhere.

    Arguments:
        sources: `[T]` int64, the address of each row; 0 = none, then it goes nowhere.
        alignment: a power of two up to 16 that divides all of them and `row_bytes`.
        row_bytes: of a row.
        routes, addresses: as in `moecomm.kernels.base`.
    """
    num_tokens, num_slots = routes.shape
    table, known = table_of(addresses, routes, row_bytes)
    moves = moves_of(row_bytes, alignment_of(alignment, row_bytes, known))
    tile = tile_of(num_tokens, moves)
    launch(
        push_rows_kernel,
        tile.num_programs,
        routes.device,
        *(0, 0, sources, num_tokens, moves.num_units, routes, num_slots, table, table),
        HAS_SOURCES=True,
        HAS_STATUS=False,
        DTYPE=moves.dtype,
        ALIGNMENT=moves.alignment,
        PER_UNIT=moves.per_unit,
        TOKENS=tile.tokens,
        COLUMNS=tile.columns,
    )


def push_weighted_rows(
    rows: Tensor, routes: Tensor, addresses: Addresses, weights: Tensor, status: Tensor | None = None
) -> None:
    """As in `moecomm.kernels.base`; arguments are checked. `status`: once a wait has failed nothing is written.

    Raises:
        ValueError: rows do not begin at multiples of their numbers' size.
    """
    num_tokens, num_slots = routes.shape
    row_bytes = rows.shape[1] * rows.element_size()
    stride = rows.stride(0) * rows.element_size()
    table, known = table_of(addresses, routes, row_bytes)
    moves = numbers_of("a row", rows.dtype, row_bytes, alignment_of(row_bytes, stride, rows.data_ptr(), known))
    tile = tile_of(num_tokens, moves)
    launch(
        push_weighted_rows_kernel,
        tile.num_programs,
        routes.device,
        *(rows.data_ptr(), stride, num_tokens, moves.num_units, routes, num_slots, table, weights),
        table if status is None else status,
        HAS_STATUS=status is not None,
        DTYPE=moves.dtype,
        ALIGNMENT=moves.alignment,
        PER_UNIT=moves.per_unit,
        TOKENS=tile.tokens,
        COLUMNS=tile.columns,
    )


def compile_cases() -> list[CompileCase]:
    """Rows of long and of short vectors, moved and scaled."""
    common = {
        "rows": "i64",
        "row_stride": "i64",
        "num_tokens": "i64",
        "num_units": "i32",
        "routes": "*i64",
        "num_slots": "i32",
        "addresses": "*i64",
        "status": "*i64",
        "HAS_STATUS": "constexpr",
        "DTYPE": "constexpr",
        "ALIGNMENT": "constexpr",
        "PER_UNIT": "constexpr",
        "TOKENS": "constexpr",
        "COLUMNS": "constexpr",
    }
    cases: list[CompileCase] = []
    for row_bytes, alignment, has_sources, num_tokens, has_status in (
        (14336, 16, False, 4096, False),
        (14336, 16, False, 4096, True),
        (14336, 16, False, 8, False),
        (14336, 16, True, 8, False),
        (512, 16, False, 4096, False),
        (14332, 4, False, 4096, False),
        (14331, 1, False, 4096, False),
        (4, 4, False, 4096, False),
    ):
        moves = moves_of(row_bytes, alignment)
        tile = tile_of(num_tokens, moves)
        cases.append(
            CompileCase(
                name=f"push_rows {alignment} bytes, {tile.columns} columns{', any source' if has_sources else ''}"
                f"{_UNLESS_FAILED if has_status else ''}",
                kernel=push_rows_kernel,
                signature={**common, "sources": "*i64", "HAS_SOURCES": "constexpr"},
                constexprs={
                    "HAS_SOURCES": has_sources,
                    "HAS_STATUS": has_status,
                    "DTYPE": moves.dtype,
                    "ALIGNMENT": alignment,
                    "PER_UNIT": moves.per_unit,
                    "TOKENS": tile.tokens,
                    "COLUMNS": tile.columns,
                },
                moves_rows=alignment == 16,
            )
        )
    # What is left: other alignments, the shortest rows, a single one.
    known = [case.constexprs for case in cases]
    extreme = [*extreme_moves(lambda moves: tile_of(4096, moves)), *extreme_moves(lambda moves: tile_of(1, moves))[-1:]]
    cases += [one for one in varied(cases[0], extreme) if one.constexprs not in known]
    kinds = [(dtype, False) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)]
    for dtype, has_status in (*kinds, (torch.bfloat16, True)):
        moves = numbers_of("a row", dtype, 4096, 16)
        tile = tile_of(4096, moves)
        weights = "*fp64" if weights_dtype(dtype) is torch.float64 else "*fp32"
        cases.append(
            CompileCase(
                name=f"push_weighted_rows {TRITON_DTYPES[dtype]}{_UNLESS_FAILED if has_status else ''}",
                kernel=push_weighted_rows_kernel,
                signature={**common, "weights": weights},
                constexprs={
                    "HAS_STATUS": has_status,
                    "DTYPE": moves.dtype,
                    "ALIGNMENT": moves.alignment,
                    "PER_UNIT": moves.per_unit,
                    "TOKENS": tile.tokens,
                    "COLUMNS": tile.columns,
                },
                moves_rows=True,
            )
        )
        if not has_status:
            case, has_its_own = cases[-1], dtype is torch.bfloat16
            cases += varied(case, extreme_numbers(dtype, lambda moves: tile_of(4096, moves)))
            cases += varied(case, extreme_numbers(dtype, lambda moves: tile_of(1, moves))[1:])
            cases += varied(case, [{"HAS_STATUS": not has_its_own}])
    return cases
