#!/usr/bin/env python3
"""Compiles every Triton kernel for several GPUs, none of which is needed, and tells what came out.

scripts/kernel_table.py                     writes docs/kernels.md
scripts/kernel_table.py --check             fails if a rule is broken or docs/kernels.md is not what it would write
scripts/kernel_table.py --check --further   also compiles the forms that docs/kernels.md does not show
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
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

# Kernels made under the interpreter cannot be compiled, and Triton decides at its first import.
os.environ.pop("TRITON_INTERPRET", None)
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import triton  # noqa: E402

from moecomm.kernels.triton import ptx, ptx_rules  # noqa: E402
from moecomm.kernels.triton.compile_case import CompileCase, all_cases  # noqa: E402
from moecomm.kernels.triton.cross_compile import Compiled, cross_compile  # noqa: E402

PAGE = ROOT / "docs" / "kernels.md"
FURTHER_CAPABILITY = 90
NETWORK_TITLE = "## Kernels that call NVSHMEM"  # what follows is nvshmem_cubins.py's
HEAD = """# Triton kernels, compiled

Every Triton kernel, compiled without a GPU by Triton {version} and the `ptxas` that comes with it; products and sums
are rounded one by one. This page is made by one command, and CI compares it:

```sh
scripts/kernel_table.py
```

Registers are per thread, spilled bytes (stores and loads together) too; shared memory is per block. Loads and stores
are those of global memory in the text of the kernel, number x width in bytes per thread; bulk copies have no width of
their own. Memory order counts barriers, fences and ordered or atomic accesses: operation, order, scope.

A kernel is launched in many forms. What the tables leave out differs from a form there in a dtype, in an alignment or
in a size: the number of ranks, of choices or of experts, rounded up to a power of two, or a tile, those that a
measurement may choose included. These forms are compiled, too, for sm_{further} and with the newest Triton
(`--further`), and keep the same rules: every combination of types and options that is launched, but that bf16 stands
for fp16 where both are only types of the same code; of each size the smallest and the largest, of numbers of ranks all
up to 128. That none is left out is tested (`tests/triton/test_launched_forms.py`). Tiles that are taken only where they
were measured to be the fastest may spill.

CI fails, for the forms of the tables with Triton 3.6.0 and with the newest, if

- a register is spilled;
- a kernel that moves rows (marked *) loads or stores them less than 16 bytes at a time;
- a path leads from a store to a release without a block barrier between: the stores of a program come from many
  threads, its signal from one;
- a path leads from an acquire to a load without a block barrier between.
"""


def facts_of(case: CompileCase, capability: int) -> dict[str, Any]:
    return {
        "name": case.name,
        "kernel": case.kernel.__name__,
        "capability": capability,
        "num_warps": case.num_warps,
        "moves_rows": case.moves_rows,
        "is_listed": case.is_listed,
    }


def numbers_of(compiled: Compiled, functions: list[ptx.Function]) -> dict[str, Any]:
    """What the page shows; loads, stores and memory order are those of these functions."""
    loads, stores, order = Counter(), Counter(), Counter()
    for function in functions:
        for total, part in zip((loads, stores), ptx.access_widths(function), strict=True):
            total.update(part)
        order.update(ptx.memory_order(function))
    return {
        "registers": compiled.registers,
        "spilled_bytes": compiled.spilled_bytes,
        "shared_bytes": compiled.shared_bytes,
        "loads": sorted(loads.items()),
        "stores": sorted(stores.items()),
        "order": sorted(order.items()),
    }


def compile_one(case: CompileCase, capability: int, cache: Path) -> dict[str, Any]:
    """Numbers and broken rules of one case, as plain values."""
    result = facts_of(case, capability)
    try:
        compiled = cross_compile(case, capability, cache)
    except Exception as error:  # noqa: BLE001  whatever a compiler raises: the other kernels are looked at all the same
        return {**result, "faults": {"compile": [f"{type(error).__name__}: {error}"]}}
    return {
        **result,
        **numbers_of(compiled, ptx.parse(compiled.ptx)),
        "faults": {
            "spills": [] if case.is_measured else ptx_rules.spill_faults(compiled.log),
            "widths": ptx_rules.width_faults(compiled.ptx) if case.moves_rows else [],
            "release": ptx_rules.release_faults(compiled.ptx),
            "acquire": ptx_rules.acquire_faults(compiled.ptx),
        },
    }


def is_wanted(case: CompileCase, capability: int, *, also_further: bool) -> bool:
    """Whether it is compiled for this capability: a form that the page does not show is for one, and if asked for."""
    is_there = case.is_listed or (also_further and capability == FURTHER_CAPABILITY)
    return is_there and capability >= case.min_capability


def cases_of(modules: list[str]) -> list[CompileCase]:
    """The cases of these modules; of the package if there are none."""
    return [case for module in modules for case in import_module(module).compile_cases()] if modules else all_cases()


def compile_all(todo: list[tuple[CompileCase, int]], cache: Path, jobs: int) -> list[dict[str, Any]]:
    """All results, of cases for capabilities, in this order; each is compiled in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        running: set[int] = set()
        for index, (case, capability) in enumerate(todo):
            while len(running) >= jobs:
                running.discard(os.wait()[0])
            pid = os.fork()
            if pid == 0:
                compile_in_child(case, capability, cache, Path(folder) / str(index))
            running.add(pid)
        while running:
            running.discard(os.wait()[0])
        return [result_of(case, capability, Path(folder) / str(n)) for n, (case, capability) in enumerate(todo)]


def compile_in_child(case: CompileCase, capability: int, cache: Path, name: Path) -> NoReturn:
    """Leaves the result in `name`.json, and in `name`.err what compilers say when they abort, as they do at times."""
    os.dup2(os.open(name.with_suffix(".err"), os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    status = 1
    try:
        name.with_suffix(".json").write_text(json.dumps(compile_one(case, capability, cache)), encoding="utf-8")
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def result_of(case: CompileCase, capability: int, name: Path) -> dict[str, Any]:
    if name.with_suffix(".json").exists():
        return json.loads(name.with_suffix(".json").read_text(encoding="utf-8"))
    said = name.with_suffix(".err").read_text(encoding="utf-8", errors="replace").strip()
    return {**facts_of(case, capability), "faults": {"compile": [f"the compiler died: {said[:500]}"]}}


def page_of(results: list[dict[str, Any]]) -> str:
    """The page, as far as it is about these."""
    head = HEAD.format(version=triton.__version__, further=FURTHER_CAPABILITY)
    return "\n".join([head, *tables_of(results, "##")]).rstrip() + "\n"


def tables_of(results: list[dict[str, Any]], level: str) -> list[str]:
    """A table for each capability, as lines; `level` stands before its title."""
    lines: list[str] = []
    columns = ["kernel", "warps", "registers", "spilled", "shared", "loads", "stores", "memory order"]
    for capability in sorted({result["capability"] for result in results}):
        lines += [f"{level} sm_{capability}", "", f"| {' | '.join(columns)} |", f"|---{'|---:' * 4}{'|---' * 3}|"]
        for result in results:
            if result["capability"] == capability and result["is_listed"]:
                lines.append(f"| {' | '.join(cells_of(result))} |")
        lines.append("")
    return lines


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
    parser.add_argument(
        "--capabilities", type=int, nargs="+", default=[80, 90, 100], metavar="N", help="such as 90 100"
    )
    parser.add_argument("--modules", nargs="+", default=[], metavar="NAME", help="modules with compile_cases instead")
    parser.add_argument("--further", action="store_true", help="also compile the forms that the page does not show")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile")
    cache = Path(tempfile.gettempdir()) / f"moecomm-kernels-{os.getuid()}"
    parser.add_argument("--cache", type=Path, default=cache, metavar="FOLDER", help="results that may be used again")
    args = parser.parse_args()

    cases = cases_of(args.modules)
    todo = [
        (case, capability)
        for capability in args.capabilities
        for case in cases
        if is_wanted(case, capability, also_further=args.further)
    ]
    results = compile_all(todo, args.cache, args.jobs)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
        return 0
    failed = False
    for result in results:
        for rule, faults in result["faults"].items():
            for fault in faults:
                failed = True
                print(f"{result['name']}, sm_{result['capability']}: {rule}: {fault}")
    there = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    page = page_of(results) + "".join(there.partition(f"\n{NETWORK_TITLE}\n")[1:])
    if not args.check:
        PAGE.write_text(page, encoding="utf-8")
        print(f"{PAGE.relative_to(ROOT)}: {len(results)} kernels compiled")
    elif there and f"by Triton {triton.__version__} " not in there:
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
