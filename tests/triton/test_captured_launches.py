"""Captured calls compile for the arguments that they pass on a GPU, as the compile cases say, and move 16 bytes."""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from moecomm.kernels.triton import captured_cards, captured_messages, captured_ready, signals

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


def test_kernels_that_wait_are_few_programs_whatever_the_sizes(monkeypatch):
    """All ranks that share a GPU must find room for theirs together."""
    launched = []
    monkeypatch.setattr(
        captured_messages, "launch", lambda kernel, num_programs, *_, **__: launched.append(num_programs)
    )
    control = SimpleNamespace(num_ranks=128, board=0, status=None, timeout_ns=0, num_windows=4)
    windows = SimpleNamespace(max_tokens=4096, num_topk=64, address=0, message_bytes=0)
    captured_messages.count_messages(control, 0, None, windows, torch.zeros(512, dtype=torch.int32), 0, ())
    assert launched == [32]
    waiting = [captured_cards, captured_messages, captured_ready, signals]
    kernels = [value for module in waiting for name, value in vars(module).items() if name.endswith("_kernel")]
    by_source = {kernel.fn.__name__ for kernel in kernels if "acquire_lanes(" in inspect.getsource(kernel.fn)}
    assert by_source == {"count_windows_kernel", "plan_announced_kernel", "find_places_kernel", "wait_kernel"}
    users = [
        path
        for path in Path(captured_cards.__file__).parent.glob("captured*.py")
        if "acquire_lanes(" in path.read_text()
    ]
    assert {path.stem for path in users} == {"captured_cards", "captured_messages", "captured_ready"}
