#!/usr/bin/env python3
"""Compiles every Triton kernel for several GPUs, none of which is needed, and tells what came out.

scripts/kernel_table.py                     writes docs/kernels.md
scripts/kernel_table.py --check             fails if a rule is broken or docs/kernels.md is not what it would write
scripts/kernel_table.py --json FILE         writes numbers and broken rules to FILE; for tests

The rules are those of moecomm/kernels/triton/ptx_rules.py.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# Kernels made under the interpreter cannot be compiled, and Triton decides at its first import.
os.environ.pop("TRITON_INTERPRET", None)
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import triton  # noqa: E402

from moecomm.kernels.triton import ptx, ptx_rules  # noqa: E402
from moecomm.kernels.triton.compile_case import CompileCase, all_cases  # noqa: E402
from moecomm.kernels.triton.cross_compile import cross_compile  # noqa: E402

CAPABILITIES = (80, 90, 100)
PAGE = ROOT / "docs" / "kernels.md"
HEAD = """# Triton kernels, compiled

Every Triton kernel, in each form in which it is launched, compiled without a GPU by Triton {version} and the `ptxas`
that comes with it; products and sums are rounded one by one. This page is made by one command, and CI compares it:

```sh
scripts/kernel_table.py
```

Registers are per thread, spilled bytes (stores and loads together) too; shared memory is per block. Loads and stores
are those of global memory in the text of the kernel, number x width in bytes per thread; bulk copies have no width of
their own. Memory order counts barriers, fences and ordered or atomic accesses: operation, order, scope.

CI fails, with Triton 3.6.0 and with the newest, for sm_80, sm_90 and sm_100, if

- a register is spilled;
- a kernel that moves rows (marked *) loads or stores them less than 16 bytes at a time;
- a path leads from a store to a release without a block barrier between: the stores of a program come from many
  threads, its signal from one;
- a path leads from an acquire to a load without a block barrier between.
"""


def compile_one(name: str, capability: int, modules: list[str], cache: str) -> dict[str, Any]:
    """Numbers and broken rules of one case, as plain values."""
    case = next(case for case in cases_of(modules) if case.name == name)
    result = {"name": name, "capability": capability, "num_warps": case.num_warps, "moves_rows": case.moves_rows}
    try:
        compiled = cross_compile(case, capability, Path(cache))
    except Exception as error:  # noqa: BLE001  whatever a compiler raises: the other kernels are looked at all the same
        return {**result, "faults": {"compile": [f"{type(error).__name__}: {error}"]}}
    loads, stores, order = Counter(), Counter(), Counter()
    for function in ptx.parse(compiled.ptx):
        for total, part in zip((loads, stores), ptx.access_widths(function), strict=True):
            total.update(part)
        order.update(ptx.memory_order(function))
    return {
        **result,
        "registers": compiled.registers,
        "spilled_bytes": compiled.spilled_bytes,
        "shared_bytes": compiled.shared_bytes,
        "loads": sorted(loads.items()),
        "stores": sorted(stores.items()),
        "order": sorted(order.items()),
        "faults": {
            "spills": ptx_rules.spill_faults(compiled.log),
            "widths": ptx_rules.width_faults(compiled.ptx) if case.moves_rows else [],
            "release": ptx_rules.release_faults(compiled.ptx),
            "acquire": ptx_rules.acquire_faults(compiled.ptx),
        },
    }


def cases_of(modules: list[str]) -> list[CompileCase]:
    """The cases of these modules; of the package if there are none."""
    return [case for module in modules for case in import_module(module).compile_cases()] if modules else all_cases()


def compile_cases(capabilities: list[int], modules: list[str], cache: str, jobs: int) -> list[dict[str, Any]]:
    """All results, by capability and name."""
    todo = [
        (case.name, capability)
        for capability in capabilities
        for case in cases_of(modules)
        if capability >= case.min_capability
    ]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(compile_one, name, capability, modules, cache) for name, capability in todo]
        return [future.result() for future in futures]


def page_of(results: list[dict[str, Any]]) -> str:
    """The whole page."""
    lines = [HEAD.format(version=triton.__version__)]
    columns = ["kernel", "warps", "registers", "spilled", "shared", "loads", "stores", "memory order"]
    for capability in sorted({result["capability"] for result in results}):
        lines += [f"## sm_{capability}", "", f"| {' | '.join(columns)} |", f"|---{'|---:' * 4}{'|---' * 3}|"]
        for result in results:
            if result["capability"] == capability:
                lines.append(f"| {' | '.join(cells_of(result))} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def cells_of(result: dict[str, Any]) -> list[str]:
    name = f"{result['name']} *" if result["moves_rows"] else result["name"]
    if "compile" in result["faults"]:
        return [name, str(result["num_warps"]), *(["not compiled"] * 6)]
    numbers = [result[column] for column in ("num_warps", "registers", "spilled_bytes", "shared_bytes")]
    widths = [
        ", ".join(f"{count} x {width or 'bulk'}" for width, count in result[column]) for column in ("loads", "stores")
    ]
    order = ", ".join(f"{kind}{f' x {count}' if count > 1 else ''}" for kind, count in result["order"])
    return [name, *map(str, numbers), *widths, order]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; compare and judge")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, and not the page")
    parser.add_argument("--capabilities", type=int, nargs="+", default=CAPABILITIES, metavar="N", help="such as 90 100")
    parser.add_argument("--modules", nargs="+", default=[], metavar="NAME", help="modules with compile_cases instead")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile")
    cache = Path(tempfile.gettempdir()) / f"moecomm-kernels-{os.getuid()}"
    parser.add_argument("--cache", default=str(cache), metavar="FOLDER", help="results that may be used again")
    args = parser.parse_args()

    results = compile_cases(list(args.capabilities), args.modules, args.cache, args.jobs)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
        return 0
    failed = False
    for result in results:
        for rule, faults in result["faults"].items():
            for fault in faults:
                failed = True
                print(f"{result['name']}, sm_{result['capability']}: {rule}: {fault}")
    page = page_of(results)
    if not args.check:
        PAGE.write_text(page, encoding="utf-8")
        print(f"{PAGE.relative_to(ROOT)}: {len(results)} kernels compiled")
    elif f"by Triton {triton.__version__} " not in (there := PAGE.read_text(encoding="utf-8")):
        print(f"{len(results)} kernels compiled by Triton {triton.__version__}; the page is another version's")
    elif page != there:
        failed = True
        print("docs/kernels.md is not what scripts/kernel_table.py makes of the kernels:")
        print("\n".join(difflib.unified_diff(there.splitlines(), page.splitlines(), "there", "made", lineterm="", n=0)))
    else:
        print(f"{len(results)} kernels compiled; docs/kernels.md is theirs")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
