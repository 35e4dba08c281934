"""What a module with Triton kernels says about them, so that each is compiled and looked at without a GPU."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from moecomm.kernels import triton as kernels

__all__ = ["LISTED_RANKS", "NUMBERS_OF_RANKS", "CompileCase", "all_cases", "varied"]

NUMBERS_OF_RANKS = (1, 2, 4, 8, 16, 32, 64, 128)
"""For which kernels are compiled that hold something of all ranks at once, rounded up to a power of two."""

LISTED_RANKS = (8, 128)
"""Those of them that the table shows."""


@dataclass(frozen=True)
class CompileCase:
    """One kernel in one form in which it is launched.

    Arguments:
        name: of the kernel and what tells this form from its others, "push_rows bf16"; unique over all modules.
        kernel: the `@triton.jit` function.
        signature: type of each argument: "*fp32", "*i64", "i64", "constexpr", ...
        constexprs: value of each argument whose type is "constexpr".
        num_warps: as it is launched.
        num_stages: as it is launched.
        max_registers: of a thread, as it is launched; None = the compiler decides.
        moves_rows: its rows must be loaded and stored 16 bytes at a time; narrower accesses are an error.
        attrs: arguments known to be divisible, with the divisor (16); None where nothing is known.
        min_capability: the lowest compute capability that it is for: 80, 90 or 100.
        is_measured: it is launched only where a measurement found it to be the fastest; it may spill registers then.
        is_listed: whether the table shows it; a form that differs from one there in a size or a dtype alone need not
            be, and is compiled for one GPU.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int | None = None
    moves_rows: bool = False
    attrs: dict[str, int] | None = None
    min_capability: int = 80
    is_measured: bool = False
    is_listed: bool = True


def varied(case: CompileCase, changes: Iterable[dict[str, Any]]) -> list[CompileCase]:
    """The case with other values for some of its constants, as often as they are others; the table does not show these.

    `moves_rows` is not asked of rows whose addresses are no multiples of 16, nor of tiles without 16 bytes per thread.
    """
    cases = []
    for change in changes:
        constexprs = {**case.constexprs, **change}
        if constexprs != case.constexprs:
            what = ", ".join(f"{name} {value}" for name, value in change.items())
            moves_rows = case.moves_rows and _has_wide_pieces(constexprs, case.num_warps)
            name = f"{case.name}; {what}"
            cases.append(replace(case, name=name, constexprs=constexprs, moves_rows=moves_rows, is_listed=False))
    return cases


def _has_wide_pieces(constexprs: dict[str, Any], num_warps: int) -> bool:
    if constexprs.get("ALIGNMENT", 16) < 16:
        return False
    tile: int = constexprs.get("BLOCK", constexprs.get("TOKENS", 0) * constexprs.get("COLUMNS", 0))
    per_unit: int = constexprs.get("PER_UNIT", 8)
    return tile == 0 or tile >= 32 * num_warps * per_unit


def all_cases() -> list[CompileCase]:
    """The cases of every module of `moecomm.kernels.triton` that has a function `compile_cases`, sorted by name.

    Raises:
        ImportError: Triton is missing.
        ValueError: two cases have one name.
    """
    cases: list[CompileCase] = []
    for found in pkgutil.walk_packages(kernels.__path__, kernels.__name__ + "."):
        cases += getattr(import_module(found.name), "compile_cases", list)()
    cases.sort(key=lambda case: case.name)
    for one, other in zip(cases, cases[1:], strict=False):
        if one.name == other.name:
            raise ValueError(f"two compile cases are named {one.name!r}")
    return cases
