"""The forms in which the grouped GEMM is launched, for the table of kernels and its test."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton.language as tl

from moecomm.kernels.triton.compile_case import CompileCase
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
    """Every product of a forward and a backward, in the tile shapes that are taken unmeasured."""
    cases = []
    for dtype in _TYPES:
        cases += _rows("grouped_gemm", dtype, "plain", _TRAINING)
        cases += _rows("grouped_gemm data gradient", dtype, "plain", _TRAINING, of_columns=True)
        cases += _rows("grouped_gemm swiglu", dtype, "swiglu", _TRAINING, also=("hidden_ptr",))
        cases += _rows(
            "grouped_gemm swiglu backward",
            dtype,
            "swiglu_backward",
            _TRAINING,
            of_columns=True,
            also=("hidden_ptr", "activation_ptr"),
        )
        cases += _weights("grouped_gemm weight gradient", dtype)
    cases += _rows("grouped_gemm decode", "bf16", "plain", _DECODE)
    cases += _rows("grouped_gemm swiglu decode", "bf16", "swiglu", _DECODE)
    cases += _rows(
        "grouped_gemm swiglu gathered weighted",
        "bf16",
        "swiglu",
        _TRAINING,
        also=("hidden_ptr", "row_idx_ptr", "row_weights_ptr"),
    )
    cases += _rows(
        "grouped_gemm swiglu backward weighted",
        "bf16",
        "swiglu_backward",
        _TRAINING,
        of_columns=True,
        also=("hidden_ptr", "activation_ptr", "row_weights_ptr", "partial_ptr"),
    )
    cases += _weights("grouped_gemm weight gradient gathered", "bf16", also=("row_idx_ptr",))
    cases += _rows("grouped_gemm slab", "bf16", "plain", _DECODE, is_slab=True)
    cases += _rows("grouped_gemm descriptors", "bf16", "plain", _TRAINING, is_described=True)
    cases += _rows(
        "grouped_gemm descriptors data gradient", "bf16", "plain", _TRAINING, of_columns=True, is_described=True
    )
    cases += _rows(
        "grouped_gemm descriptors swiglu", "bf16", "swiglu", _TRAINING, also=("hidden_ptr",), is_described=True
    )
    cases += _rows(
        "grouped_gemm descriptors swiglu backward",
        "bf16",
        "swiglu_backward",
        _TRAINING,
        of_columns=True,
        also=("hidden_ptr", "activation_ptr"),
        is_described=True,
    )
    cases += _weights("grouped_gemm descriptors weight gradient", "bf16", is_described=True)
    return cases


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
) -> list[CompileCase]:
    """The forms of `multiply_rows_kernel`.

    Arguments:
        of_columns: columns of the weight are contiguous, otherwise its inner dim.
        is_described: operands come by tensor descriptors.
        also: optional pointers that are given.
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

    shapes = _shapes(epilogue, dtype, rows_per_expert, is_described)
    sizes = ("num_inner", "num_columns")
    cases = _cases(name, multiply_rows_kernel, dtype, shapes, given, sizes, constexprs)
    if not is_described:
        return cases
    weight = ("INNER", "COLUMNS") if of_columns else ("COLUMNS", "INNER")
    return [_described(case, dtype, {"x_ptr": ("ROWS", "INNER"), "weight_ptr": weight}) for case in cases]


def _weights(name: str, dtype: str, *, is_described: bool = False, also: tuple[str, ...] = ()) -> list[CompileCase]:
    blocks = ("left_blocks", "right_blocks") if is_described else ()
    given = ("left_ptr", "right_ptr", "out_ptr", "offsets_ptr", *blocks, *also)

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
    shapes = _shapes("weights", dtype, _TRAINING, is_described)
    cases = _cases(name, weight_gradient_kernel, dtype, shapes, given, sizes, constexprs)
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
