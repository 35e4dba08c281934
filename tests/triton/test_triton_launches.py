"""The way to a launch on a GPU, as far as it goes without one: kernels compile for the arguments that they get."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "launched_signatures.py"
MODULES = ("combine", "counts", "eager_messages", "fingerprint", "flat", "gradients", "plans", "push", "values")


def test_kernels_compile_for_what_launches_pass():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM.read_text(encoding="utf-8")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    launched = json.loads(done.stdout)
    cases = {}
    for name in MODULES:
        for case in importlib.import_module(f"moecomm.kernels.triton.{name}").compile_cases():
            cases.setdefault(case.kernel.__name__, []).append(case.signature)
    assert {name for name, _, _ in launched} == set(cases)
    for name, signature, ptx in launched:
        shown = {argument: kind for argument, kind in signature.items() if kind != "constexpr"}
        known = [{a: kind for a, kind in case.items() if kind != "constexpr"} for case in cases[name]]
        assert shown in known, (name, shown)
        assert "fma." not in ptx, name
        assert ".ftz" not in ptx, name
        if name in ("push_rows_kernel", "push_weighted_rows_kernel", "combine_rows_kernel", "scale_dot_kernel"):
            assert re.search(r"ld\.global\S*\.v(2\.b64|4\.b32)", ptx), name
            assert re.search(r"st\.global\S*\.v(2\.b64|4\.b32)", ptx), name
