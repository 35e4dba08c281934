"""One number per route, fetched from where the route leads. Numbers move as integers of their size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.triton.compile_case import CompileCase
from moecomm.kernels.triton.lanes import unless_failed
from moecomm.kernels.triton.runtime import Addresses, launch, num_blocks, table_of
from moecomm.kernels.triton.tiles import numbers_of

__all__ = ["compile_cases", "pull_values", "pull_values_unless_failed"]

_ROUTES = 512


@triton.jit(do_not_specialize=["num_routes"], do_not_specialize_on_alignment=["addresses", "status"])
def pull_values_kernel(
    out: tl.tensor,
    routes: tl.tensor,
    num_routes: tl.int64,
    addresses: tl.tensor,
    status: tl.tensor,
    HAS_STATUS: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    ROUTES: tl.constexpr,
) -> None:
    """`out` `[num_routes]` int32 or int64: the bits of each route's value, 0 where there is none.

    HAS_STATUS: as in `lanes.unless_failed`: once a wait has failed nothing is read or written.
    """
    if HAS_STATUS:
        num_routes = unless_failed(status, num_routes)
    position = tl.program_id(0).to(tl.int64) * ROUTES + tl.arange(0, ROUTES)
    route = tl.load(routes + position, mask=position < num_routes, other=-1)
    is_route = route >= 0
    place = tl.load(addresses + (route >> 40), mask=is_route, other=0) + (route & 0xFFFFFFFFFF) * VALUE_BYTES
    value = tl.load(place.to(tl.pointer_type(out.dtype.element_ty)), mask=is_route, other=0)
    tl.store(out + position, value, mask=position < num_routes)


def pull_values(routes: Tensor, addresses: Addresses, dtype: torch.dtype) -> Tensor:
    """As in `moecomm.kernels.base`; arguments are checked."""
    out = torch.empty(routes.shape, dtype=dtype, device=routes.device)
    table, known = table_of(addresses, routes, dtype.itemsize)
    numbers_of("addresses", dtype, 0, known)
    _launch(out, routes, table, None)
    return out


def pull_values_unless_failed(out: Tensor, routes: Tensor, addresses: Tensor, status: Tensor) -> None:
    """The same into `out`, contiguous, from addresses that only the device knows; nothing once a wait has failed."""
    _launch(out, routes, addresses, status)


def _launch(out: Tensor, routes: Tensor, addresses: Tensor, status: Tensor | None) -> None:
    launch(
        pull_values_kernel,
        num_blocks(routes.numel(), _ROUTES),
        routes.device,
        *(out.view(torch.int32 if out.element_size() == 4 else torch.int64), routes, routes.numel(), addresses),
        addresses if status is None else status,
        HAS_STATUS=status is not None,
        VALUE_BYTES=out.element_size(),
        ROUTES=_ROUTES,
    )


def compile_cases() -> list[CompileCase]:
    """Values of both sizes."""
    return [
        CompileCase(
            name=f"pull_values {bits}{', unless a wait has failed' * has_status}",
            kernel=pull_values_kernel,
            signature={
                "out": bits,
                "routes": "*i64",
                "num_routes": "i64",
                "addresses": "*i64",
                "status": "*i64",
                "HAS_STATUS": "constexpr",
                "VALUE_BYTES": "constexpr",
                "ROUTES": "constexpr",
            },
            constexprs={"HAS_STATUS": has_status, "VALUE_BYTES": value_bytes, "ROUTES": _ROUTES},
        )
        for has_status in (False, True)
        for bits, value_bytes in (("*i32", 4), ("*i64", 8))
    ]
