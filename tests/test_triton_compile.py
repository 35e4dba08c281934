"""Every Triton kernel compiles for GPUs that are not there, and its PTX keeps the rules (docs/kernels.md).

Compilers run in a process of their own: here Triton may have been imported for its interpreter.
"""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]
ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "kernel_table.py"
RULES = ["spills", "widths", "release", "acquire"]


def run_table(*flags):
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(paths)
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, flags)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=220,
    )


def compiled(path, *flags):
    done = run_table("--json", path, *flags)
    assert done.returncode == 0, done.stderr
    return {(one["name"], one["capability"]): one for one in json.loads(path.read_text(encoding="utf-8"))}


@pytest.fixture(scope="module", params=[90, 100], ids=["sm_90", "sm_100"])
def kernels(request, tmp_path_factory):
    """What became of every kernel, by name; one architecture at a time, so that a test takes half as long."""
    path = tmp_path_factory.mktemp("kernels") / "results.json"
    return {name: one for (name, _), one in compiled(path, "--capabilities", request.param).items()}


@pytest.fixture(scope="module")
def broken_flags(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return ["--capabilities", 90, 100, "--cache", cache, "--modules", "broken_kernels"]


@pytest.fixture(scope="module")
def broken(broken_flags, tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("broken") / "results.json", *broken_flags)


@pytest.mark.parametrize("rule", ["compile", *RULES])
def test_every_kernel_keeps_the_rule(kernels, rule):
    faults = {name: one["faults"][rule] for name, one in kernels.items() if one["faults"].get(rule)}
    assert not faults, "\n".join(f"{name}: {fault}" for name, found in faults.items() for fault in found)


def is_launched(node):
    """Whether it is a Triton function that is launched, rather than called by others: its name says so."""
    decorators = [ast.unparse(one) for one in getattr(node, "decorator_list", [])]
    return any(one.startswith("triton.jit") for one in decorators) and node.name.endswith("_kernel")


def test_no_kernel_is_left_out(kernels):
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "moecomm" / "kernels" / "triton").rglob("*.py")]
    # Those that call NVSHMEM are compiled where it is installed: scripts/nvshmem_cubins.py.
    sources = [source for source in sources if "def linked_cases" not in source]
    launched = {node.name for source in sources for node in ast.walk(ast.parse(source)) if is_launched(node)}
    assert launched == {one["kernel"] for one in kernels.values()}


@pytest.mark.parametrize("capability", [90, 100])
def test_a_kernel_that_breaks_a_rule_is_caught(broken, capability):
    for (name, where), one in broken.items():
        if where == capability and ":" in name:
            assert [rule for rule, found in one["faults"].items() if found] == [name.partition(":")[0]], (name, one)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("name", ["sound signal", "sound wait"])
def test_numbers_of_a_sound_kernel(broken, capability, name):
    one = broken[name, capability]
    assert one["faults"] == {rule: [] for rule in RULES}
    assert one["loads"] == [[16, 2]]
    assert one["stores"] == [[16, 2]]
    assert 8 <= one["registers"] <= 64
    assert (one["spilled_bytes"], one["num_warps"]) == (0, 4)
    order = dict(one["order"])
    assert order.pop("bar.sync") >= 1
    assert order == {{"sound signal": "red.release.sys.add", "sound wait": "ld.acquire.sys"}[name]: 1}


def test_a_kernel_for_new_devices_is_not_compiled_for_old_ones(broken):
    assert ("not for old devices", 100) in broken
    assert ("not for old devices", 90) not in broken


def test_the_check_fails_and_says_why(broken, broken_flags):
    done = run_table("--check", *broken_flags)
    assert done.returncode == 1, done.stderr
    assert "release: no barrier, sm_90: release: signal_after_rows: no block barrier between" in done.stdout


def test_results_are_used_again(broken, broken_flags, tmp_path):
    cache = broken_flags[broken_flags.index("--cache") + 1]
    made = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert len(made) == len([one for one in broken.values() if "compile" not in one["faults"]])
    assert compiled(tmp_path / "again.json", *broken_flags) == broken
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == made


def test_forms_that_the_page_leaves_out_are_compiled_if_asked_for(broken_flags, tmp_path):
    name = "not listed"
    assert (name, 90) not in compiled(tmp_path / "listed.json", *broken_flags)
    found = compiled(tmp_path / "all.json", *broken_flags, "--further")
    assert (name, 90) in found
    assert (name, 100) not in found
    assert found[name, 90]["faults"] == {rule: [] for rule in RULES}
