"""Captured calls compile for the arguments that they pass on a GPU, as the compile cases say, and move 16 bytes."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
MODULES = ("announce", "answers", "cards", "combine", "messages", "plan", "ready", "rows", "send", "static", "zeros")
MODULES = (*(f"captured_{name}" for name in MODULES), "flat", "values")
MOVES_ROWS = ("send_messages_kernel", "place_rows_kernel", "send_outputs_kernel", "pull_sums_kernel")


def test_captured_kernels_compile_for_what_launches_pass():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    command = [sys.executable, str(HERE / "captured_signatures.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    launched = json.loads(done.stdout)
    cases = {}
    for name in MODULES:
        for case in importlib.import_module(f"moecomm.kernels.triton.{name}").compile_cases():
            kinds = {argument: kind for argument, kind in case.signature.items() if kind != "constexpr"}
            cases.setdefault(case.kernel.__name__, []).append(kinds)
    assert set(cases) <= set(launched)
    for name in cases:
        kinds, ptx = launched[name]
        assert kinds in cases[name], (name, kinds)
        assert "fma." not in ptx, name
        if name in MOVES_ROWS:
            assert re.search(r"ld\.global\S*\.v(2\.b64|4\.b32)", ptx), name
            assert re.search(r"st\.global\S*\.v(2\.b64|4\.b32)", ptx), name
