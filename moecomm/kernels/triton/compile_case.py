"""What a module with Triton kernels says about them, so that each is compiled and looked at without a GPU."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from moecomm.kernels import triton as kernels

__all__ = ["CompileCase", "all_cases"]


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
        moves_rows: its rows must be loaded and stored 16 bytes at a time; narrower accesses are an error.
        attrs: arguments known to be divisible, with the divisor (16); None where nothing is known.
        min_capability: the lowest compute capability that it is for: 80, 90 or 100.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    moves_rows: bool = False
    attrs: dict[str, int] | None = None
    min_capability: int = 80


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
