"""Prints the memory instructions of the kernels of window_ranks.py, compiled for a GPU: JSON, a list per kernel.

Usage: compile_window_kernels.py CAPABILITY... (without TRITON_INTERPRET)
"""

import json
import re
import sys

import triton
import window_ranks
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {
    "rows": "*i32",
    "out": "*i32",
    "places": "*i64",
    "messages": "*i64",
    "arrivals": "*i32",
    "boards": "*i64",
    "status": "*i64",
    "num_rows": "i32",
    "num_ranks": "i32",
    "HOW": "constexpr",
    "R": "constexpr",
}
KERNELS = {
    "push": (window_ranks.push_rows, window_ranks.BY_LAST_PROGRAM),
    "copy": (window_ranks.copy_messages, window_ranks.BY_ITSELF),
}


def memory_instructions(kernel, how, capability):
    signature = {name: TYPES.get(name, "i64") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs={"HOW": how, "R": 8})
    target = GPUTarget("cuda", capability, 32)
    ptx = triton.compile(source, target=target, options={"enable_fp_fusion": False}).asm["ptx"]
    return re.findall(r"\b(bar\.sync|(?:atom|red|st|ld)\.global[.\w:]*)", ptx)


if __name__ == "__main__":
    found = {
        f"{name} sm_{capability}": memory_instructions(*kernel, int(capability))
        for name, kernel in KERNELS.items()
        for capability in sys.argv[1:]
    }
    json.dump(found, sys.stdout)
