"""One number per route, fetched from where the route leads. Numbers move as integers of their size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.triton.compile_case import CompileCase
from moecomm.kernels.triton.runtime import Addresses, launch, num_blocks, table_of
from moecomm.kernels.triton.tiles import numbers_of

__all__ = ["compile_cases", "pull_values"]

_ROUTES = 512


@triton.jit(do_not_specialize=["num_routes"])
def pull_values_kernel(
    out: tl.tensor,
    routes: tl.tensor,
    num_routes: tl.int64,
    addresses: tl.tensor,
    VALUE_BYTES: tl.constexpr,
    ROUTES: tl.constexpr,
) -> None:
    """`out` `[num_routes]` int32 or int64: the bits of each route's value, 0 where there is none."""
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
    bits = out.view(torch.int32 if dtype.itemsize == 4 else torch.int64)
    args = (bits, routes, routes.numel(), table)
    num_programs = num_blocks(routes.numel(), _ROUTES)
    launch(pull_values_kernel, num_programs, routes.device, *args, VALUE_BYTES=dtype.itemsize, ROUTES=_ROUTES)
    return out


def compile_cases() -> list[CompileCase]:
    """Values of both sizes."""
    return [
        CompileCase(
            name=f"pull_values {bits}",
            kernel=pull_values_kernel,
            signature={
                "out": bits,
                "routes": "*i64",
                "num_routes": "i64",
                "addresses": "*i64",
                "VALUE_BYTES": "constexpr",
                "ROUTES": "constexpr",
            },
            constexprs={"VALUE_BYTES": value_bytes, "ROUTES": _ROUTES},
        )
        for bits, value_bytes in (("*i32", 4), ("*i64", 8))
    ]
