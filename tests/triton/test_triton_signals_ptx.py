"""Signals inside kernels that move rows, compiled: block barriers stand where the threads of a program need them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CAPABILITIES = ("80", "90", "100")


@pytest.fixture(scope="module")
def instructions():
    """Kernel and architecture to its memory instructions in their order, from a process that does not interpret."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_window_kernels.py"), *CAPABILITIES],
        env=env | {"PYTHONPATH": path, "TRITON_DEFAULT_FP_FUSION": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def unfenced_releases(found):
    """Loads and stores after which a release comes without a block barrier between."""
    wrong, since = [], []
    for instruction in found:
        if instruction == "bar.sync":
            since = []
        elif instruction.startswith(("ld.", "st.")):
            since.append(instruction)
        elif "release" in instruction or "acq_rel" in instruction:
            wrong += since
    return wrong


def unfenced_acquires(found):
    """Loads that come after an acquire without a block barrier between."""
    wrong, acquired = [], False
    for instruction in found:
        if instruction == "bar.sync":
            acquired = False
        elif instruction.startswith("ld.") and acquired:
            wrong.append(instruction)
        elif "acquire" in instruction or "acq_rel" in instruction:
            acquired = True
    return wrong


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_push_releases_behind_a_barrier(instructions, capability):
    found = instructions[f"push sm_{capability}"]
    arrival = next(n for n, name in enumerate(found) if name.startswith("atom.global.gpu.acq_rel.add"))
    release = next(n for n, name in enumerate(found) if "global.sys.release.add.u64" in name)
    stores = [n for n, name in enumerate(found) if name.startswith("st.")]
    assert min(stores) < arrival < release
    assert max(stores) < release
    assert not unfenced_releases(found)
    assert not unfenced_acquires(found)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_copy_reads_behind_the_barrier_of_its_acquire(instructions, capability):
    found = instructions[f"copy sm_{capability}"]
    acquires = [n for n, name in enumerate(found) if name.startswith("atom.global.sys.acquire.add.u64")]
    rows = [n for n, name in enumerate(found) if name.startswith("ld.global") and "relaxed" not in name]
    assert len(acquires) == 2  # one before the loop, one in it
    assert rows
    assert max(acquires) < min(rows)
    assert not unfenced_acquires(found)


def test_a_missing_barrier_would_be_seen():
    store, load = "st.global.b32", "ld.global.b32"
    release, acquire = "red.global.sys.release.add.u64", "atom.global.sys.acquire.add.u64"
    assert unfenced_releases([store, "bar.sync", store, release]) == [store]
    assert unfenced_releases([load, release]) == [load]
    assert not unfenced_releases([load, store, "bar.sync", release, store])
    assert unfenced_acquires([acquire, load, "bar.sync", load]) == [load]
    assert not unfenced_acquires([load, acquire, "bar.sync", load])
