"""Kernels that break one rule each, whatever Triton adds by itself, and two that keep them all."""

import os

import triton
import triton.language as tl

from moecomm.kernels.triton.compile_case import CompileCase


@triton.jit
def copy_rows(rows, out, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offsets, tl.load(rows + offsets))


@triton.jit
def signal_after_rows(rows, out, counter, BLOCK: tl.constexpr, HAS_BARRIER: tl.constexpr):
    copy_rows(rows, out, BLOCK)
    if HAS_BARRIER:
        tl.debug_barrier()
    # Newer versions of Triton put a barrier before a scalar atomic by themselves; before this they cannot.
    tl.inline_asm_elementwise(
        "{ red.release.sys.global.add.u64 [$1], 1; mov.u32 $0, 0; }",
        "=r,l",
        [counter.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def rows_after_wait(rows, out, counter, BLOCK: tl.constexpr, HAS_BARRIER: tl.constexpr):
    seen = tl.inline_asm_elementwise(
        "ld.acquire.sys.global.b64 $0, [$1];",
        "=l,l",
        [counter.to(tl.int64, bitcast=True)],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )
    if HAS_BARRIER:
        tl.debug_barrier()
    if seen > 0:
        copy_rows(rows, out, BLOCK)


@triton.jit
def sums_of_neighbours(rows, out, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    here = tl.load(rows + columns)
    tl.store(out + columns, here)
    tl.debug_barrier()
    tl.store(out + columns, here + tl.load(out + (columns ^ 1)))


@triton.jit
def not_a_kernel(rows, out, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), tl.load(rows + tl.arange(0, BLOCK + 1)))


class Aborts(dict):
    """Ends the process that looks into it, as an assertion in a compiler does."""

    def items(self):
        os.abort()


POINTERS = {"rows": "*fp32", "out": "*fp32"}
ALIGNED = {"rows": 16, "out": 16}


def compile_cases():
    """The cases, named after the rule that they break."""

    def copies(name, **rest):
        return CompileCase(name, copy_rows, {**POINTERS, "BLOCK": "constexpr"}, {"BLOCK": 1024}, **rest)

    def signals(name, kernel, has_barrier):
        signature = {**POINTERS, "counter": "*i64", "BLOCK": "constexpr", "HAS_BARRIER": "constexpr"}
        constants = {"BLOCK": 1024, "HAS_BARRIER": has_barrier}
        return CompileCase(name, kernel, signature, constants, moves_rows=True, attrs=ALIGNED)

    large = {"BLOCK": 16384}
    unknown = {**POINTERS, "BLOCK": "constexpr"}
    return [
        copies("compile: the compiler dies", attrs=Aborts(rows=16)),
        CompileCase("compile: not a kernel", not_a_kernel, unknown, {"BLOCK": 1024}),
        copies("widths: nothing known of addresses", moves_rows=True),
        CompileCase("spills: too much at once", sums_of_neighbours, unknown, large, num_warps=1, attrs=ALIGNED),
        signals("release: no barrier", signal_after_rows, False),
        signals("acquire: no barrier", rows_after_wait, False),
        signals("sound signal", signal_after_rows, True),
        signals("sound wait", rows_after_wait, True),
        copies("not for old devices", min_capability=100),
        copies("not listed", is_listed=False),
    ]
