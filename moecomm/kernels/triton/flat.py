"""What belongs to flat rows: the local experts that a token chose at a rank, their weights, and values fetched back.

    T tokens   K num_topk   P num_slots

Weights and values move as integers of their size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.triton.compile_case import CompileCase, varied
from moecomm.kernels.triton.lanes import unless_failed
from moecomm.kernels.triton.runtime import Addresses, alignment_of, launch, num_blocks, table_of
from moecomm.kernels.triton.tiles import numbers_of

__all__ = ["compile_cases", "pull_flat_unless_failed", "pull_flat_values", "push_flat_metadata"]

_ELEMENTS = 512


@triton.jit(do_not_specialize=["num_tokens", "num_topk", "num_slots", "num_experts"])
def push_flat_kernel(
    ids: tl.tensor,
    num_tokens: tl.int64,
    num_topk: tl.int32,
    weights: tl.tensor,
    routes: tl.tensor,
    num_slots: tl.int32,
    expert_rank: tl.tensor,
    expert_local: tl.tensor,
    num_experts: tl.int32,
    id_addresses: tl.tensor,
    weight_addresses: tl.tensor,
    status: tl.tensor,
    HAS_STATUS: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    TOKENS: tl.constexpr,
    CHOICES: tl.constexpr,
) -> None:
    """Local ids, and the bits of weights (VALUE_BYTES each; 0 = none), to each row of some tokens.

    HAS_STATUS: as in `lanes.unless_failed`: once a wait has failed nothing is written.
    """
    if HAS_STATUS:
        num_tokens = unless_failed(status, num_tokens)
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, CHOICES)
    is_token = t < num_tokens
    is_entry = is_token[:, None] & (k < num_topk)[None, :]
    place = t[:, None] * num_topk + k[None, :]
    id = tl.load(ids + place, mask=is_entry, other=-1).to(tl.int64)
    is_id = (id >= 0) & (id < num_experts)
    chosen = tl.load(expert_rank + id, mask=is_id, other=-1)
    local = tl.load(expert_local + id, mask=is_id, other=-1)
    if VALUE_BYTES > 0:
        weight = tl.load(weights + place, mask=is_entry, other=0)
    for p in range(num_slots):
        route = tl.load(routes + t * num_slots + p, mask=is_token, other=-1)
        is_route = route >= 0
        rank = route >> 40
        column = (route & 0xFFFFFFFFFF)[:, None] * num_topk + k[None, :]
        is_written = is_entry & is_route[:, None]
        is_there = chosen == rank[:, None]
        row = tl.load(id_addresses + rank, mask=is_route, other=0).to(tl.pointer_type(tl.int32))
        tl.store(row[:, None] + column, tl.where(is_there, local, -1), mask=is_written)
        if VALUE_BYTES > 0:
            target = tl.load(weight_addresses + rank, mask=is_route, other=0)
            target = target.to(tl.pointer_type(weights.dtype.element_ty))
            tl.store(target[:, None] + column, tl.where(is_there, weight, 0), mask=is_written)


@triton.jit(
    do_not_specialize=["num_tokens", "num_topk", "num_slots", "num_experts"],
    do_not_specialize_on_alignment=["addresses", "status"],
)
def pull_flat_kernel(
    out: tl.tensor,
    ids: tl.tensor,
    num_tokens: tl.int64,
    num_topk: tl.int32,
    routes: tl.tensor,
    num_slots: tl.int32,
    expert_rank: tl.tensor,
    num_experts: tl.int32,
    addresses: tl.tensor,
    status: tl.tensor,
    HAS_STATUS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHOICES: tl.constexpr,
) -> None:
    """`out` `[T, K]` int32 or int64: the bits of column k of the token's row at the rank of its expert k, or 0.

    HAS_STATUS: as in `lanes.unless_failed`: once a wait has failed nothing is read or written.
    """
    if HAS_STATUS:
        num_tokens = unless_failed(status, num_tokens)
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, CHOICES)
    is_token = t < num_tokens
    is_entry = is_token[:, None] & (k < num_topk)[None, :]
    place = t[:, None] * num_topk + k[None, :]
    id = tl.load(ids + place, mask=is_entry, other=-1).to(tl.int64)
    chosen = tl.load(expert_rank + id, mask=(id >= 0) & (id < num_experts), other=-1)
    value = tl.zeros((TOKENS, CHOICES), dtype=out.dtype.element_ty)
    for p in range(num_slots):
        route = tl.load(routes + t * num_slots + p, mask=is_token, other=-1)
        is_route = route >= 0
        rank = route >> 40
        column = (route & 0xFFFFFFFFFF)[:, None] * num_topk + k[None, :]
        row = tl.load(addresses + rank, mask=is_route, other=0).to(tl.pointer_type(out.dtype.element_ty))
        is_there = (chosen == rank[:, None]) & is_route[:, None]
        value = tl.where(is_there, tl.load(row[:, None] + column, mask=is_there, other=0), value)
    tl.store(out + place, value, mask=is_entry)


def push_flat_metadata(
    ids: Tensor,
    weights: Tensor | None,
    routes: Tensor,
    expert_rank: Tensor,
    expert_local: Tensor,
    id_addresses: Addresses,
    weight_addresses: Addresses | None,
    status: Tensor | None = None,
) -> None:
    """As in `moecomm.kernels.base`; arguments are checked and ids contiguous. `status`: as in `push.push_rows`."""
    num_tokens, num_topk = ids.shape
    id_table, known = table_of(id_addresses, routes, num_topk)
    numbers_of("idx_addresses", torch.int32, 0, known)
    bits, weight_table, value_bytes = ids, id_table, 0
    if weights is not None and weight_addresses is not None:
        value_bytes = weights.element_size()
        weight_table, known = table_of(weight_addresses, routes, num_topk)
        numbers_of("weight_addresses", weights.dtype, 0, alignment_of(known))
        bits = _bits(weights)
    tokens, choices = _tile(num_topk)
    launch(
        push_flat_kernel,
        num_blocks(num_tokens, tokens) if num_topk else 0,
        ids.device,
        *(ids, num_tokens, num_topk, bits, routes, routes.shape[1], expert_rank, expert_local, expert_rank.numel()),
        *(id_table, weight_table, id_table if status is None else status),
        HAS_STATUS=status is not None,
        VALUE_BYTES=value_bytes,
        TOKENS=tokens,
        CHOICES=choices,
    )


def pull_flat_values(
    ids: Tensor, routes: Tensor, expert_rank: Tensor, addresses: Addresses, dtype: torch.dtype
) -> Tensor:
    """As in `moecomm.kernels.base`; arguments are checked and ids contiguous."""
    num_tokens, num_topk = ids.shape
    out = torch.empty(num_tokens, num_topk, dtype=dtype, device=ids.device)
    table, known = table_of(addresses, routes, num_topk)
    numbers_of("addresses", dtype, 0, known)
    _pull(out, ids, routes, expert_rank, table, None)
    return out


def pull_flat_unless_failed(
    out: Tensor, ids: Tensor, routes: Tensor, expert_rank: Tensor, addresses: Tensor, status: Tensor
) -> None:
    """The same into `out`, contiguous, from addresses that only the device knows; nothing once a wait has failed."""
    _pull(out, ids, routes, expert_rank, addresses, status)


def _pull(
    out: Tensor, ids: Tensor, routes: Tensor, expert_rank: Tensor, addresses: Tensor, status: Tensor | None
) -> None:
    num_tokens, num_topk = ids.shape
    tokens, choices = _tile(num_topk)
    launch(
        pull_flat_kernel,
        num_blocks(num_tokens, tokens) if num_topk else 0,
        ids.device,
        *(_bits(out), ids, num_tokens, num_topk, routes, routes.shape[1], expert_rank, expert_rank.numel()),
        *(addresses, addresses if status is None else status),
        HAS_STATUS=status is not None,
        TOKENS=tokens,
        CHOICES=choices,
    )


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32 if values.element_size() == 4 else torch.int64)


def _tile(num_topk: int) -> tuple[int, int]:
    choices = triton.next_power_of_2(max(1, num_topk))
    return max(1, _ELEMENTS // choices), choices


def compile_cases() -> list[CompileCase]:
    """Ids of both widths; weights of both sizes and none."""
    tokens, choices = _tile(8)
    common = {
        "num_tokens": "i64",
        "num_topk": "i32",
        "routes": "*i64",
        "num_slots": "i32",
        "expert_rank": "*i32",
        "num_experts": "i32",
        "TOKENS": "constexpr",
        "CHOICES": "constexpr",
    }
    tile = {"TOKENS": tokens, "CHOICES": choices}
    cases: list[CompileCase] = []
    for ids in ("*i32", "*i64"):
        for value_bytes, bits, has_status in (
            (0, ids, False),
            (4, "*i32", False),
            (8, "*i64", False),
            (4, "*i32", True),
            (0, ids, True),
            (8, "*i64", True),
        ):
            is_listed = value_bytes == 4 or not has_status
            cases.append(
                CompileCase(
                    name=f"push_flat {ids} with weights of {value_bytes} bytes"
                    f"{', unless a wait has failed' if has_status else ''}",
                    kernel=push_flat_kernel,
                    signature={
                        **common,
                        "ids": ids,
                        "weights": bits,
                        "expert_local": "*i32",
                        "id_addresses": "*i64",
                        "weight_addresses": "*i64",
                        "status": "*i64",
                        "HAS_STATUS": "constexpr",
                        "VALUE_BYTES": "constexpr",
                    },
                    constexprs={**tile, "VALUE_BYTES": value_bytes, "HAS_STATUS": has_status},
                    is_listed=is_listed,
                )
            )
            if value_bytes:
                places = {"out": bits, "addresses": "*i64", "status": "*i64", "HAS_STATUS": "constexpr"}
                cases.append(
                    CompileCase(
                        name=f"pull_flat {ids}, values of {value_bytes} bytes"
                        f"{', unless a wait has failed' if has_status else ''}",
                        kernel=pull_flat_kernel,
                        signature={**common, "ids": ids, **places},
                        constexprs={**tile, "HAS_STATUS": has_status},
                        is_listed=is_listed,
                    )
                )
    tiles = [dict(zip(tile, _tile(num_topk), strict=True)) for num_topk in (1, 16)]
    return cases + varied(cases[-1], tiles) + varied(cases[-2], tiles)
