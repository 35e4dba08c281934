"""Kernels that call NVSHMEM become cubins where its bitcode is installed, and the rules for their PTX."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moecomm.kernels.triton.ptx_rules import network_faults
from moecomm.transports.nvshmem_library import find_library

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "nvshmem_cubins.py"
KERNELS = ("far_push_kernel", "far_wait_kernel", "put_messages_kernel", "put_outputs_kernel")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
needs_nvshmem = pytest.mark.skipif(bool(find_library().problem), reason=f"needs NVSHMEM: {find_library().problem}")


def run_program(*arguments):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *map(str, arguments)], env=env, capture_output=True, text=True, check=False, timeout=280
    )


def run_script(*flags):
    return run_program(SCRIPT, *flags)


@needs_triton
@pytest.mark.slow
@needs_nvshmem
def test_every_kernel_that_calls_nvshmem_becomes_a_cubin(tmp_path):
    done = run_script("--json", tmp_path / "results.json", "--capabilities", 90)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert {one["kernel"] for one in results} == set(KERNELS)
    assert not [(one["name"], one["faults"]) for one in results if one["faults"]]


@needs_triton
@needs_nvshmem
@pytest.mark.slow
def test_a_launch_initialises_each_module_once_before_it_runs():
    program = ROOT / "tests" / "launched_linked.py"
    done = run_program(program, find_library().bitcode(90))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["events"] == [
        *(event for n, name in enumerate(KERNELS, 1001) for event in (f"initialise {n}", f"launch {name}")),
        *(f"launch {name}" for name in KERNELS * 2),
    ]
    # What is compiled without a GPU (linked_cases) is what is launched on one.
    assert answer["compiled"] == declared(("far_push", "far_wait", "captured_far"))


def declared(modules):
    program = (
        f"import json; from moecomm.kernels.triton import {', '.join(modules)}; "
        f"cases = [case for module in ({', '.join(modules)}) for case in module.linked_cases()]; "
        "first = {case.kernel.__name__: case.signature for case in reversed(cases)}; "
        f"print(json.dumps([[name, first[name]] for name in {KERNELS}]))"
    )
    done = run_program("-c", program)
    return json.loads(done.stdout)


@needs_triton
@pytest.mark.slow
def test_a_folder_without_nvshmem_and_one_without_bitcode_are_named(tmp_path):
    done = run_script(tmp_path)
    assert done.returncode == 2
    assert "libnvshmem_host.so.3) was not found" in done.stderr
    (tmp_path / "libnvshmem_host.so.3").touch()
    done = run_script(tmp_path, "--capabilities", 90)
    assert done.returncode == 1, done.stderr
    assert f"FAULT: {tmp_path} has no bitcode for sm_90" in done.stdout


# -- the rule on barriers ----------------------------------------------------------------------------------------------

STORE, LOAD, BARRIER = "st.global.b32 [%rd1], %r1;", "ld.global.b32 %r1, [%rd1];", "bar.sync 0;"
RELEASE = "atom.acq_rel.gpu.global.add.u32 %r1, [%rd1], 1;"


def call(name):
    return f"call.uni (retval0), moecomm_nvshmem_{name}, (param0);"


PUT, SIGNAL, FENCE, QUIET, REFRESH = map(call, ("put", "signal", "fence", "quiet", "refresh"))


def faults(*lines):
    body = "\n".join(lines)
    return network_faults(f".visible .entry kernel(.param .u64 p)\n.reqntid 128\n{{\n{body}\nret;\n}}\n")


@pytest.mark.parametrize(
    "lines",
    [
        (STORE, BARRIER, PUT, PUT, BARRIER, FENCE, BARRIER, SIGNAL),
        (PUT, BARRIER, QUIET, BARRIER, RELEASE, BARRIER, SIGNAL),
        (REFRESH, BARRIER, LOAD),
        (PUT, STORE),
        (STORE, "call.uni (retval0), vprintf, (param0);", BARRIER, PUT),
    ],
)
def test_sound_orders_are_no_faults(lines):
    assert faults(*lines) == []


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((STORE, PUT), "between line 4: st.global.b32"),
        ((STORE, SIGNAL), "and line 5: call.uni (retval0), moecomm_nvshmem_signal"),
        ((RELEASE, SIGNAL), "no block barrier between line 4: atom.acq_rel"),
        ((QUIET, RELEASE), "no block barrier between line 4: call.uni (retval0), moecomm_nvshmem_quiet"),
        ((FENCE, SIGNAL), "moecomm_nvshmem_fence"),
        ((REFRESH, LOAD), "moecomm_nvshmem_refresh"),
        (("@%p1 bra $L1;", BARRIER, "$L1:", "bra $L2;", STORE, "$L2:", STORE, PUT), "st.global"),
        ((PUT, "call.uni (retval0), another, (param0);"), "what is called is not looked at"),
    ],
)
def test_a_missing_barrier_is_a_fault(lines, words):
    found = faults(*lines)
    assert len(found) == 1, found
    assert words in found[0]


def test_a_kernel_that_calls_nothing_of_nvshmem_is_not_judged():
    assert faults(STORE, "call.uni (retval0), another, (param0);") == []


PAGE = """import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import kernel_table, nvshmem_cubins
kernel_table.PAGE = Path(sys.argv[2])
kernel_table.tables_of = lambda results, level: [f"{level} sm_{one['capability']}\\n\\ntable\\n" for one in results]
results = [{"nvshmem": sys.argv[4], "capability": number, "name": "a"} for number in (90, 100)]
print(nvshmem_cubins.is_page_wrong(results, writes=sys.argv[3] == "write"))
"""


@needs_triton
def test_a_page_that_says_what_is_not_so_is_wrong(tmp_path):
    page = tmp_path / "kernels.md"
    page.write_text("# Kernels\n\nOther tables\n", encoding="utf-8")

    def is_wrong(how="compare", version="3.4.5"):
        done = run_program("-c", PAGE, SCRIPT.parent, page, how, version)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1] == "True"

    assert is_wrong()  # there is no such part
    assert not is_wrong("write")
    assert not is_wrong()
    right = page.read_text(encoding="utf-8")
    assert right.startswith("# Kernels\n\nOther tables\n")
    for old, new in (("sm_90\n\ntable", "sm_90\n\nchair"), ("NVSHMEM moves rows by itself", "Nothing moves")):
        assert old in right
        page.write_text(right.replace(old, new), encoding="utf-8")
        assert is_wrong()
        assert not is_wrong(version="3.8.0")
