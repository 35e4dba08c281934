#!/usr/bin/env python3
"""Compiles the kernels that call NVSHMEM for GPUs that are not there, linked with NVSHMEM's bitcode.

scripts/nvshmem_cubins.py                    links the NVSHMEM that is installed
scripts/nvshmem_cubins.py FOLDER ...         links those in these folders, such as nvidia/nvshmem/lib of a wheel
scripts/nvshmem_cubins.py --write            writes the part of docs/kernels.md that is about these kernels
scripts/nvshmem_cubins.py --json FILE        writes what came out to FILE, and always ends with 0; for tests

A kernel is at fault if it does not become a cubin, if a function is left without a body, if NVSHMEM's state is not in
it (which `nvshmemx_cumodule_init` fills in), or if it breaks a rule of ptx_rules.py: no spills, and block barriers
beside releases, acquires and what it calls. So is docs/kernels.md, if what it says of these versions is not so.
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

import kernel_table  # noqa: E402
import triton  # noqa: E402

from moecomm.kernels.triton import captured_far, far_push, far_wait, ptx, ptx_rules  # noqa: E402
from moecomm.kernels.triton.cross_compile import Compiled, cross_compile  # noqa: E402
from moecomm.kernels.triton.nvshmem_device import linked_with  # noqa: E402
from moecomm.transports.nvshmem_library import NvshmemLibrary, find_library, library_in  # noqa: E402

CASES = [*far_push.linked_cases(), *far_wait.linked_cases(), *captured_far.linked_cases()]
VERSIONS = "Linked with the bitcode of NVSHMEM {nvshmem} by Triton {triton}."
TEXT = f"""
{kernel_table.NETWORK_TITLE}

{VERSIONS} Another command makes this part of the page, and CI
compares it, too:

```sh
scripts/nvshmem_cubins.py --write
```

Registers and spilled bytes are those of a kernel with what it calls; loads, stores and memory order are the kernel's
own: NVSHMEM moves rows by itself, and no rule looks into it. For the kernels the rules above hold, and one more: a
block barrier stands between stores and what puts or signals them, and behind what waits for puts or makes them visible.
"""
OF_CUDA = ("vprintf", "__assertfail")
WITHOUT_BODY = re.compile(r"^\.extern\s+\.func\b(?:\s*\([^)]*\))?\s*([\w$]+)", re.MULTILINE)


def faults_of(compiled: Compiled, kernel: str) -> list[str]:
    """What is wrong with one result; empty = nothing."""
    faults = [f"{name} has no body" for name in WITHOUT_BODY.findall(compiled.ptx) if name not in OF_CUDA]
    if not re.search(r"^\.visible\s+\.const\b.*\bnvshmemi_device_state_d\b", compiled.ptx, re.MULTILINE):
        faults.append("NVSHMEM's state is not in it")
    faults += ptx_rules.spill_faults(compiled.log, kernel) + ptx_rules.network_faults(compiled.ptx)
    return faults + ptx_rules.release_faults(compiled.ptx, kernel) + ptx_rules.acquire_faults(compiled.ptx, kernel)


def compile_one(index: int, library: NvshmemLibrary, capability: int, cache: Path) -> dict[str, Any]:
    """Numbers and faults of one kernel of CASES, as plain values."""
    case = CASES[index]
    result = {**kernel_table.facts_of(case, capability), "nvshmem": library.version}
    bitcode = library.bitcode(capability)
    if bitcode is None:
        return {**result, "faults": [f"{Path(library.path).parent} has no bitcode for sm_{capability}"]}
    try:
        compiled = cross_compile(case, capability, cache, linked_with(bitcode))
    except Exception as error:  # noqa: BLE001  whatever a compiler raises: the other kernels are looked at all the same
        return {**result, "bitcode": bitcode.name, "faults": [f"{type(error).__name__}: {error}"]}
    own = [function for function in ptx.parse(compiled.ptx) if function.name == result["kernel"]]
    numbers = kernel_table.numbers_of(compiled, own)
    return {**result, **numbers, "bitcode": bitcode.name, "faults": faults_of(compiled, result["kernel"])}


def versions_of(results: list[dict[str, Any]]) -> dict[str, str]:
    """What TEXT says, of one NVSHMEM."""
    return {"nvshmem": results[0]["nvshmem"], "triton": triton.__version__}


def part_of(results: list[dict[str, Any]]) -> str:
    """The part of the page about these results, of one NVSHMEM."""
    text = TEXT.format(**versions_of(results))
    ordered = sorted(results, key=lambda one: (one["capability"], one["name"]))
    return "\n".join([text, *kernel_table.tables_of(ordered, "###")]).rstrip() + "\n"


def is_page_wrong(results: list[dict[str, Any]], *, writes: bool) -> bool:
    """Writes the part of the page, or says whether what is there of these versions and architectures is not so."""
    before, title, rest = kernel_table.PAGE.read_text(encoding="utf-8").partition(f"\n{kernel_table.NETWORK_TITLE}\n")
    made = part_of(results)
    if writes:
        kernel_table.PAGE.write_text(before + made, encoding="utf-8")
        return False
    if title and VERSIONS.format(**versions_of(results)) not in rest:
        print("docs/kernels.md is about other versions of Triton and NVSHMEM")
        return False
    parts, parts_there = (part.strip().split("\n\n### ") for part in (made, title + rest))
    wrong = [part for part in parts if part not in parts_there]
    for part in wrong:
        print(f"docs/kernels.md is not what scripts/nvshmem_cubins.py --write makes of the kernels: {part}")
    return bool(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="where libnvshmem_host.so.3 is")
    parser.add_argument("--write", action="store_true", help="write their part of docs/kernels.md")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile")
    parser.add_argument("--capabilities", type=int, nargs="+", default=[90, 100], metavar="N", help="such as 90 100")
    cache = Path(tempfile.gettempdir()) / f"moecomm-kernels-{os.getuid()}"
    parser.add_argument("--cache", type=Path, default=cache, metavar="FOLDER", help="results that may be used again")
    args = parser.parse_args()

    if args.write and len(args.folders) > 1:
        parser.error("--write: the page is about one NVSHMEM")
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
    is_faulty = any(one["faults"] for one in results)
    if is_faulty:
        return 1
    by_library = [[one for one in results if one["nvshmem"] == library.version] for library in libraries]
    return int(any([is_page_wrong(one, writes=args.write) for one in by_library]))


if __name__ == "__main__":
    sys.exit(main())
