"""Every form in which a kernel is launched is compiled without a GPU, and keeps the rules of docs/kernels.md there.

A form is what makes other code: the types of arguments, dtypes, options. Sizes of tiles, numbers of ranks and the like
follow from the sizes of a call; of each the largest and the smallest are compiled, and all that is between them passes.
"""

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from moecomm.kernels import triton as kernels

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parent / "launched_forms.py"
MOVES = ("DTYPE", "ALIGNMENT", "PER_UNIT")
PRODUCTS = ("multiply_rows_kernel", "weight_gradient_kernel")
OPTIONS = ("FILL", "VALUE_BYTES")  # numbers, but no sizes
OF_SIZES = ("EVEN_INNER", "SPLITS_COLUMNS")  # no numbers, but they follow from sizes


def is_size(name, value):
    return type(value) is int and name.isupper() and name not in (*MOVES, *OPTIONS)


def form_of(one):
    options = {n: v for n, v in one["constants"].items() if n not in (*MOVES, *OF_SIZES) and not is_size(n, v)}
    # A descriptor's type has the sizes of its blocks.
    types = {name: re.sub(r"\[.*\]", "", kind) for name, kind in one["types"].items()}
    form = json.dumps([one["kernel"], types, options], sort_keys=True)
    # Products of both are made by the same instructions but for a name; the table shows the common ones of fp16.
    return form.replace("fp16", "bf16") if one["kernel"] in PRODUCTS else form


def sizes_of(one):
    constants = one["constants"]
    sizes = {name: int(value) for name, value in constants.items() if is_size(name, value) or name in OF_SIZES}
    if {"TOKENS", "COLUMNS"} <= set(sizes):
        sizes["TOKENS x COLUMNS"] = sizes["TOKENS"] * sizes["COLUMNS"]
    if "ALIGNMENT" in constants:
        sizes[f"ALIGNMENT of {constants['DTYPE']}"] = constants["ALIGNMENT"]
    return {**sizes, "num_warps": one["num_warps"]}


def compiled():
    """The cases of all modules, as the program shows launches."""
    for found in pkgutil.walk_packages(kernels.__path__, kernels.__name__ + "."):
        module = vars(importlib.import_module(found.name))
        for make in ("compile_cases", "linked_cases"):
            for case in module.get(make, list)():
                values = {
                    name: value if value is None or isinstance(value, (bool, int, str)) else str(value)
                    for name, value in case.constexprs.items()
                }
                yield {
                    "name": case.name,
                    "kernel": case.kernel.__name__,
                    "types": {name: kind for name, kind in case.signature.items() if kind != "constexpr"},
                    "constants": values,
                    "num_warps": case.num_warps,
                }


@pytest.fixture(scope="module")
def cases():
    return list(compiled())


@pytest.fixture(scope="module")
def launched():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    roots = [str(PROGRAM.parents[2]), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(roots)
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=200, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_every_form_that_is_launched_is_compiled(cases, launched):
    known = {form_of(case) for case in cases}
    missing = sorted({form_of(one) for one in launched} - known)
    assert not missing, f"{len(missing)} forms:\n" + "\n".join(missing)


def test_sizes_lie_between_those_that_are_compiled(cases, launched):
    known = defaultdict(list)
    for case in cases:
        for size, value in sizes_of(case).items():
            known[case["kernel"], size].append(value)
    outside = set()
    for one in launched:
        for size, value in sizes_of(one).items():
            there = known[one["kernel"], size]
            if not there or not min(there) <= value <= max(there):
                outside.add((one["kernel"], size, value, str(sorted(set(there)))))
    assert not outside, "\n".join(map(str, sorted(outside, key=str)))


def test_nothing_is_compiled_that_is_not_launched(cases, launched):
    known = {form_of(one) for one in launched}
    idle = [case["name"] for case in cases if form_of(case) not in known]
    assert not idle, idle
