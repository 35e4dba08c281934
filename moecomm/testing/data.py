"""Rows that know where they come from: (rank, token) is written into every row, exactly, in every dtype.

    code = (token * num_ranks + rank) + 1        written as digits of as many bits as the dtype holds exactly
    row[c] = (digit[c % D] + c // D) mod base    so that a row moved by any number of columns is seen, too

A zero row is nobody's: that is what padding looks like.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["origin_of_rows", "rows_with_origin"]

# Integers below 2**bits are exact in the dtype.
_BITS = {
    torch.float64: 20,
    torch.float32: 20,
    torch.float16: 10,
    torch.bfloat16: 8,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 3,
    torch.uint8: 8,
    torch.int8: 7,
    torch.int16: 14,
    torch.int32: 20,
    torch.int64: 20,
}
_CODE_BITS = 40  # of a code; rows with fewer columns hold fewer


def rows_with_origin(
    rank: int, num_tokens: int, hidden: int, dtype: torch.dtype = torch.float32, *, num_ranks: int = 64
) -> Tensor:
    """Rows that each encode their rank and token.

    Arguments:
        rank: 0 <= rank < num_ranks.
        num_tokens: number of rows.
        hidden: number of columns.
        dtype: a floating dtype, also float8, or an integer dtype.
        num_ranks: how many ranks the code has room for; the decoder must be told the same.

    Returns:
        `[num_tokens, hidden]` of `dtype`; no row is zero.

    Raises:
        ValueError: the rows are too narrow to hold that many codes, or an argument is out of range.
    """
    bits, num_digits = _digits(hidden, dtype)
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank must be in [0, {num_ranks}), got {rank}")
    room = 1 << (bits * num_digits)
    if num_tokens and (num_tokens - 1) * num_ranks + rank + 1 >= room:
        raise ValueError(
            f"hidden: {hidden} columns of {dtype} hold {room} codes, "
            f"too few for {num_tokens} tokens of each of {num_ranks} ranks"
        )
    codes = torch.arange(num_tokens, dtype=torch.int64) * num_ranks + rank + 1
    return _write(codes, hidden, dtype)


def origin_of_rows(rows: Tensor, *, num_ranks: int = 64) -> Tensor:
    """Reads (rank, token) back.

    Arguments:
        rows: `[num_rows, hidden]` written by `rows_with_origin`, or zero rows.
        num_ranks: as given when writing.

    Returns:
        `[num_rows, 2]` int64: rank and token, (-1, -1) for a zero row.

    Raises:
        ValueError: a row is neither zero nor what `rows_with_origin` would write; names the first such row.
    """
    num_rows, hidden = rows.shape
    bits, num_digits = _digits(hidden, rows.dtype)
    base = 1 << bits
    # Through float32: some dtypes do not convert to int64 directly, and every digit is exact in it.
    read = rows if rows.dtype == torch.float64 else rows.to(torch.float32)
    digits = torch.nan_to_num(read[:, :num_digits], nan=0.0, posinf=0.0, neginf=0.0).to(torch.int64)
    codes = (digits * base ** torch.arange(num_digits)).sum(dim=1)
    zero = (read == 0).all(dim=1)
    whole = (read == _write(codes, hidden, rows.dtype).to(read.dtype)).all(dim=1) & (codes > 0)
    if not bool((whole | zero).all()):
        first = int((~(whole | zero)).nonzero()[0])
        raise ValueError(f"row {first} of {num_rows} is not a row of any rank: {read[first, :8].tolist()}...")
    origin = torch.stack([(codes - 1) % num_ranks, (codes - 1) // num_ranks], dim=1)
    origin[zero] = -1
    return origin


def _digits(hidden: int, dtype: torch.dtype) -> tuple[int, int]:
    if dtype not in _BITS:
        raise ValueError(f"dtype must be one of {[str(known) for known in _BITS]}, got {dtype}")
    if hidden < 1:
        raise ValueError(f"hidden must be at least 1, got {hidden}")
    bits = _BITS[dtype]
    return bits, min(hidden, -(-_CODE_BITS // bits))


def _write(codes: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
    bits, num_digits = _digits(hidden, dtype)
    columns = torch.arange(hidden)
    digits = codes[:, None] >> (bits * (columns % num_digits))[None, :]
    values = (digits + columns // num_digits) & ((1 << bits) - 1)
    return values.to(torch.float64).to(dtype) if dtype.is_floating_point else values.to(dtype)
