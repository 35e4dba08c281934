#!/usr/bin/env python3
"""Compiles the kernels that call NVSHMEM for GPUs that are not there, linked with NVSHMEM's bitcode.

scripts/nvshmem_cubins.py                    links the NVSHMEM that is installed
scripts/nvshmem_cubins.py FOLDER ...         links those in these folders, such as nvidia/nvshmem/lib of a wheel
scripts/nvshmem_cubins.py --json FILE        writes what came out to FILE, and always ends with 0; for tests

A kernel is at fault if it does not become a cubin, if a function is left without a body, if NVSHMEM's state is not in
it (which `nvshmemx_cumodule_init` fills in), or if a block barrier is missing beside what it calls (ptx_rules.py).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# Kernels made under the interpreter cannot be compiled, and Triton decides at its first import.
os.environ.pop("TRITON_INTERPRET", None)
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import triton  # noqa: E402

from moecomm.kernels.triton import captured_far, far_push, far_wait, ptx_rules  # noqa: E402
from moecomm.kernels.triton.cross_compile import Compiled, cross_compile  # noqa: E402
from moecomm.kernels.triton.nvshmem_device import linked_with  # noqa: E402
from moecomm.transports.nvshmem_library import NvshmemLibrary, find_library, library_in  # noqa: E402

CASES = [*far_push.linked_cases(), *far_wait.linked_cases(), *captured_far.linked_cases()]
OF_CUDA = ("vprintf", "__assertfail")
WITHOUT_BODY = re.compile(r"^\.extern\s+\.func\b(?:\s*\([^)]*\))?\s*([\w$]+)", re.MULTILINE)


def faults_of(compiled: Compiled) -> list[str]:
    """What is wrong with one result; empty = nothing."""
    faults = [f"{name} has no body" for name in WITHOUT_BODY.findall(compiled.ptx) if name not in OF_CUDA]
    if not re.search(r"^\.visible\s+\.const\b.*\bnvshmemi_device_state_d\b", compiled.ptx, re.MULTILINE):
        faults.append("NVSHMEM's state is not in it")
    return faults + ptx_rules.network_faults(compiled.ptx)


def compile_one(index: int, library: NvshmemLibrary, capability: int, cache: Path) -> dict[str, Any]:
    """Numbers and faults of one kernel of CASES, as plain values."""
    case = CASES[index]
    result = {"name": case.name, "kernel": case.kernel.__name__, "capability": capability, "nvshmem": library.version}
    bitcode = library.bitcode(capability)
    if bitcode is None:
        return {**result, "faults": [f"{Path(library.path).parent} has no bitcode for sm_{capability}"]}
    try:
        compiled = cross_compile(case, capability, cache, linked_with(bitcode))
    except Exception as error:  # noqa: BLE001  whatever a compiler raises: the other kernels are looked at all the same
        return {**result, "bitcode": bitcode.name, "faults": [f"{type(error).__name__}: {error}"]}
    faults = faults_of(compiled)
    return {**result, "bitcode": bitcode.name, "registers": compiled.registers, "faults": faults}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="where libnvshmem_host.so.3 is")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile")
    parser.add_argument("--capabilities", type=int, nargs="+", default=[90, 100], metavar="N", help="such as 90 100")
    cache = Path(tempfile.gettempdir()) / f"moecomm-kernels-{os.getuid()}"
    parser.add_argument("--cache", type=Path, default=cache, metavar="FOLDER", help="results that may be used again")
    args = parser.parse_args()

    libraries = [library_in([folder]) for folder in args.folders] or [find_library()]
    for library in libraries:
        if library.problem:
            parser.error(library.problem)
    todo = [
        (index, library, capability, args.cache)
        for library in libraries
        for capability in args.capabilities
        for index in range(len(CASES))
    ]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("fork")) as pool:
        results = list(pool.map(compile_one, *zip(*todo, strict=True)))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
        return 0
    for one in results:
        where = f"NVSHMEM {one['nvshmem']}, sm_{one['capability']}, {one['name']}"
        said = "; ".join(one["faults"]) or f"{one['registers']} registers with {one['bitcode']}"
        print(f"{where}: {'FAULT: ' if one['faults'] else ''}{said}")
    print(f"{len(results)} kernels compiled by Triton {triton.__version__} and linked with NVSHMEM")
    return int(any(one["faults"] for one in results))


if __name__ == "__main__":
    sys.exit(main())
