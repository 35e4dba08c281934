"""The forms in which the grouped GEMM is launched, for the table of kernels and its test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton.language as tl

from moecomm.kernels.triton.compile_case import CompileCase, varied
from moecomm.kernels.triton.grouped_gemm_rows import multiply_rows_kernel
from moecomm.kernels.triton.grouped_gemm_weights import weight_gradient_kernel
from moecomm.kernels.triton.tile_shapes import TileShape, candidate_shapes, default_shape

__all__ = ["compile_cases"]

_TYPES = {
    "bf16": (torch.bfloat16, tl.bfloat16),
    "fp16": (torch.float16, tl.float16),
    "fp32": (torch.float32, tl.float32),
}
_DECODE, _TRAINING = 16, 1024  # rows per expert
_BLOCK_EXPERTS = 64


def compile_cases() -> list[CompileCase]:
    """Every product of a forward and a backward, in the tile shapes that are taken unmeasured; the others for bf16."""
    cases = []
    for dtype in _TYPES:
        cases += _products(dtype)
        cases += [dataclasses.replace(case, is_listed=dtype == "bf16") for case in _options(dtype)]
        if dtype != "fp16":  # of which compilers make what they make of bf16
            cases += [dataclasses.replace(case, is_listed=False) for case in _further(dtype)]
            plain = _rows("grouped_gemm", dtype, "plain", _TRAINING)[0]
            cases += varied(plain, [{"CLEARS_PADDING": False, "CLEARS_TAIL": False}])
    for case in [case for case in _products("bf16") if "BLOCK_EXPERTS" in case.constexprs]:
        cases += varied(case, [{"BLOCK_EXPERTS": 2}, {"BLOCK_EXPERTS": 512}, {"EVEN_INNER": False}])
    measured = [case for dtype in ("bf16", "fp32") for case in _candidates(dtype)]
    return cases + [case for case in measured if not any(_is_same(case, one) for one in cases)]


def _products(dtype: str) -> list[CompileCase]:
    backward = ("hidden_ptr", "activation_ptr")
    return [
        *_rows("grouped_gemm", dtype, "plain", _TRAINING),
        *_rows("grouped_gemm data gradient", dtype, "plain", _TRAINING, of_columns=True),
        *_rows("grouped_gemm swiglu", dtype, "swiglu", _TRAINING, also=("hidden_ptr",)),
        *_rows("grouped_gemm swiglu backward", dtype, "swiglu_backward", _TRAINING, of_columns=True, also=backward),
        *_weights("grouped_gemm weight gradient", dtype),
    ]


def _options(dtype: str) -> list[CompileCase]:
    """Few rows; rows gathered and weighted; slabs; descriptors, where there can be any."""
    gathered = ("hidden_ptr", "row_idx_ptr", "row_weights_ptr")
    weighted = ("hidden_ptr", "activation_ptr", "row_weights_ptr", "partial_ptr")
    cases = [
        *_rows("grouped_gemm decode", dtype, "plain", _DECODE),
        *_rows("grouped_gemm swiglu decode", dtype, "swiglu", _DECODE),
        *_rows("grouped_gemm swiglu gathered weighted", dtype, "swiglu", _TRAINING, also=gathered),
        *_rows(
            "grouped_gemm swiglu backward weighted",
            dtype,
            "swiglu_backward",
            _TRAINING,
            of_columns=True,
            also=weighted,
        ),
        *_weights("grouped_gemm weight gradient gathered", dtype, also=("row_idx_ptr",)),
        *_rows("grouped_gemm slab", dtype, "plain", _DECODE, is_slab=True),
    ]
    return cases + _described_products(dtype) if _TYPES[dtype][0].itemsize == 2 else cases


def _further(dtype: str) -> list[CompileCase]:
    """Slabs, and weights of rows that are not gathered, by pointers and by descriptors."""
    cases = varied(_rows("grouped_gemm slab", dtype, "plain", _DECODE, is_slab=True)[0], [{"CLEARS_PADDING": False}])
    pointers = ("hidden_ptr", "activation_ptr")
    backward: dict[str, Any] = {"of_columns": True, "also": pointers}
    weighted: dict[str, Any] = {"of_columns": True, "also": (*pointers, "row_weights_ptr", "partial_ptr")}
    for is_described in (False, True) if _TYPES[dtype][0].itemsize == 2 else (False,):
        name = f"grouped_gemm{' descriptors' * is_described}"
        num_rows = _TRAINING if is_described else _DECODE
        how: dict[str, Any] = {"is_described": is_described}
        also: tuple[str, ...] = ("hidden_ptr", "row_weights_ptr")
        cases += _rows(f"{name} swiglu weighted", dtype, "swiglu", _TRAINING, also=also, **how)
        # Without a backward nothing is kept for it.
        also = ("row_weights_ptr",)
        cases += _rows(f"{name} swiglu weighted, nothing kept", dtype, "swiglu", num_rows, also=also, **how)
        if is_described:
            cases += _rows(f"{name} swiglu, nothing kept", dtype, "swiglu", num_rows, **how)
        else:
            also = ("row_idx_ptr", "row_weights_ptr")
            cases += _rows(f"{name} swiglu gathered weighted, nothing kept", dtype, "swiglu", num_rows, also=also)
        how = {"is_slab": True, **how}
        cases += _rows(f"{name} slab swiglu", dtype, "swiglu", num_rows, also=("hidden_ptr",), **how)
        cases += _rows(f"{name} slab swiglu, nothing kept", dtype, "swiglu", num_rows, **how)
        cases += _rows(f"{name} slab swiglu backward", dtype, "swiglu_backward", num_rows, **backward, **how)
        cases += _rows(f"{name} slab data gradient", dtype, "plain", num_rows, of_columns=True, **how)
        cases += _weights(f"{name} slab weight gradient", dtype, **how)
        if is_described:
            slab = _rows(f"{name} slab", dtype, "plain", num_rows, **how)
            cases += slab + varied(slab[0], [{"CLEARS_PADDING": False}])
            plain = _rows(name, dtype, "plain", _TRAINING, is_described=True)
            cases += varied(plain[0], [{"CLEARS_PADDING": False, "CLEARS_TAIL": False}])
            name = f"{name} swiglu backward weighted"
            cases += _rows(name, dtype, "swiglu_backward", _TRAINING, is_described=True, **weighted)
    return cases


def _described_products(dtype: str) -> list[CompileCase]:
    described: dict[str, Any] = {"is_described": True}
    return [
        *_rows("grouped_gemm descriptors", dtype, "plain", _TRAINING, **described),
        *_rows("grouped_gemm descriptors data gradient", dtype, "plain", _TRAINING, of_columns=True, **described),
        *_rows("grouped_gemm descriptors swiglu", dtype, "swiglu", _TRAINING, also=("hidden_ptr",), **described),
        *_rows(
            "grouped_gemm descriptors swiglu backward",
            dtype,
            "swiglu_backward",
            _TRAINING,
            of_columns=True,
            also=("hidden_ptr", "activation_ptr"),
            **described,
        ),
        *_weights("grouped_gemm descriptors weight gradient", dtype, **described),
    ]


def _candidates(dtype: str) -> list[CompileCase]:
    """Every product of a backward and a forward in shapes that may be measured, for capability 90.

    Of shapes that differ in how many stages there are, the deepest; for few rows and for many.
    """
    backward: dict[str, Any] = {"of_columns": True, "also": ("hidden_ptr", "activation_ptr")}
    products: dict[str, Callable[..., list[CompileCase]]] = {
        "plain": partial(_rows, "grouped_gemm", dtype, "plain", _TRAINING),
        "swiglu": partial(_rows, "grouped_gemm swiglu", dtype, "swiglu", _TRAINING, also=("hidden_ptr",)),
        "swiglu_backward": partial(
            _rows, "grouped_gemm swiglu backward", dtype, "swiglu_backward", _TRAINING, **backward
        ),
        "weights": partial(_weights, "grouped_gemm weight gradient", dtype),
    }
    cases = []
    for kind, product in products.items():
        found: list[TileShape] = []
        for rows_per_expert in (16, 64, _TRAINING):
            itemsize = _TYPES[dtype][0].itemsize
            found += candidate_shapes(kind, itemsize, rows_per_expert, 90, allows_descriptors=True)
        found.sort(key=lambda shape: shape.num_stages)
        # How many programs there are is nothing that a kernel knows.
        shapes = {dataclasses.replace(shape, programs_per_sm=1, num_stages=1): shape for shape in found}
        for is_described in (False, True):
            chosen = [shape for shape in shapes.values() if shape.uses_descriptors is is_described]
            cases += product(shapes=chosen, is_described=is_described)
    return cases


def _is_same(one: CompileCase, other: CompileCase) -> bool:
    """Whether the same is compiled."""
    one, other = (dataclasses.replace(case, name="", is_listed=True, min_capability=80) for case in (one, other))
    return one == dataclasses.replace(other, is_measured=one.is_measured)


def _rows(
    name: str,
    dtype: str,
    epilogue: str,
    rows_per_expert: int,
    *,
    of_columns: bool = False,
    is_slab: bool = False,
    is_described: bool = False,
    also: tuple[str, ...] = (),
    shapes: list[TileShape] | None = None,
) -> list[CompileCase]:
    """The forms of `multiply_rows_kernel`.

    Arguments:
        of_columns: columns of the weight are contiguous, otherwise its inner dim.
        is_described: operands come by tensor descriptors.
        also: optional pointers that are given.
        shapes: which are measured; None = those that are taken unmeasured.
    """
    given = ("x_ptr", "weight_ptr", "out_ptr", "counts_ptr" if is_slab else "offsets_ptr", *also)
    contiguous = "stride_weight_column" if of_columns else "stride_weight_inner"

    def constexprs(shape: TileShape) -> dict[str, Any]:
        return {
            "EPILOGUE": epilogue,
            "COMPUTE": _TYPES[dtype][1],
            "CLEARS_PADDING": epilogue == "plain",
            "CLEARS_TAIL": epilogue == "plain" and not is_slab,
            "DESCRIPTORS": contiguous.removeprefix("stride_weight_").replace("column", "columns")
            if is_described
            else "none",
            "EVEN_INNER": True,
            "SPLITS_COLUMNS": shape.splits_columns,
            "BLOCK_EXPERTS": _BLOCK_EXPERTS,
            "BLOCK_ROWS": shape.rows,
            "BLOCK_COLUMNS": shape.columns,
            "BLOCK_INNER": shape.inner,
            "GROUP": shape.group,
            contiguous: 1,
        }

    sizes = ("num_inner", "num_columns")
    if shapes is None:
        by_capability = _shapes(epilogue, dtype, rows_per_expert, is_described)
        cases = _cases(name, multiply_rows_kernel, dtype, by_capability, given, sizes, constexprs)
    else:
        cases = _measured_cases(name, multiply_rows_kernel, dtype, shapes, given, sizes, constexprs)
    if not is_described:
        return cases
    weight = ("INNER", "COLUMNS") if of_columns else ("COLUMNS", "INNER")
    return [_described(case, dtype, {"x_ptr": ("ROWS", "INNER"), "weight_ptr": weight}) for case in cases]


def _weights(
    name: str,
    dtype: str,
    *,
    is_slab: bool = False,
    is_described: bool = False,
    also: tuple[str, ...] = (),
    shapes: list[TileShape] | None = None,
) -> list[CompileCase]:
    """The forms of `weight_gradient_kernel`; arguments as for `_rows`."""
    blocks = ("left_blocks", "right_blocks") if is_described else ()
    given = ("left_ptr", "right_ptr", "out_ptr", "counts_ptr" if is_slab else "offsets_ptr", *blocks, *also)

    def constexprs(shape: TileShape) -> dict[str, Any]:
        return {
            "COMPUTE": _TYPES[dtype][1],
            "REST_STAGES": 1 if is_described else shape.num_stages,
            "BLOCK_LEFT": shape.rows,
            "BLOCK_RIGHT": shape.columns,
            "BLOCK_ROWS": shape.inner,
            "GROUP": shape.group,
        }

    sizes = ("num_left", "num_right")
    if shapes is None:
        by_capability = _shapes("weights", dtype, _TRAINING, is_described)
        cases = _cases(name, weight_gradient_kernel, dtype, by_capability, given, sizes, constexprs)
    else:
        cases = _measured_cases(name, weight_gradient_kernel, dtype, shapes, given, sizes, constexprs)
    if not is_described:
        return cases
    described = {"left_blocks": ("ROWS", "LEFT"), "right_blocks": ("ROWS", "RIGHT")}
    return [_described(case, dtype, described) for case in cases]


def _shapes(kind: str, dtype: str, rows_per_expert: int, is_described: bool) -> dict[int, TileShape]:
    """By capability."""
    itemsize = _TYPES[dtype][0].itemsize
    if is_described:
        return {90: candidate_shapes(kind, itemsize, rows_per_expert, 90, allows_descriptors=True)[-1]}
    return {capability: default_shape(kind, itemsize, rows_per_expert, capability) for capability in (80, 90, 100)}


def _cases(
    name: str,
    kernel: Any,
    dtype: str,
    shapes: dict[int, TileShape],
    given: tuple[str, ...],
    sizes: tuple[str, ...],
    constexprs: Any,
) -> list[CompileCase]:
    """One case for each shape that some capability takes, from the lowest that takes it on."""
    cases: dict[TileShape, CompileCase] = {}
    for capability, shape in shapes.items():
        if shape in cases:
            continue
        values = constexprs(shape)
        signature: dict[str, str] = {}
        for argument in kernel.arg_names:
            if argument in values:
                signature[argument] = "constexpr"
            elif argument.endswith(("_ptr", "_blocks")) and argument not in given:
                signature[argument], values[argument] = "constexpr", None
            else:
                signature[argument] = _type_of(argument, dtype)
        cases[shape] = CompileCase(
            name=f"{name} {dtype} {shape.rows}x{shape.columns}x{shape.inner}",
            kernel=kernel,
            signature=signature,
            constexprs=values,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
            attrs={
                argument: 16
                for argument, kind in signature.items()
                if kind != "constexpr" and argument.startswith("stride_") or kind.startswith("*") or argument in sizes
            },
            min_capability=capability,
        )
    return list(cases.values())


def _measured_cases(name: str, kernel: Any, dtype: str, shapes: list[TileShape], *rest: Any) -> list[CompileCase]:
    """One case for each shape, named after all of it."""
    cases = []
    for shape in shapes:
        for case in _cases(name, kernel, dtype, {90: shape}, *rest):
            how = f"{', descriptors' * shape.uses_descriptors}, {shape.num_warps} warps, {shape.num_stages} stages"
            cases.append(dataclasses.replace(case, name=case.name + how, is_measured=True, is_listed=False))
    return cases


def _described(case: CompileCase, dtype: str, blocks: dict[str, tuple[str, str]]) -> CompileCase:
    """The case with descriptors for some arguments; `blocks` names the sizes of their blocks."""
    types = {}
    for argument, names in blocks.items():
        rows, columns = (case.constexprs[f"BLOCK_{name}"] for name in names)
        types[argument] = f"tensordesc<{dtype}[{rows}, {columns}]>"
    attrs = {argument: divisor for argument, divisor in (case.attrs or {}).items() if argument not in types}
    return dataclasses.replace(case, signature={**case.signature, **types}, attrs=attrs)


def _type_of(argument: str, dtype: str) -> str:
    types = {
        "row_idx_ptr": "*i64",
        "row_weights_ptr": "*fp32",
        "partial_ptr": "*fp32",
        "offsets_ptr": "*i32",
        "counts_ptr": "*i64",
    }
    return types.get(argument, f"*{dtype}" if argument.endswith("_ptr") else "i32")
