"""Every launch of the grouped GEMM compiles for a GPU, with the arguments as they come."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

FORWARD = [["multiply_rows_kernel", "swiglu"], ["multiply_rows_kernel", "plain"]]
BACKWARD = [
    ["multiply_rows_kernel", "swiglu_backward"],
    ["weight_gradient_kernel", None],
    ["weight_gradient_kernel", None],
    ["multiply_rows_kernel", "plain"],
]
SLAB = [["multiply_rows_kernel", "plain"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "how", "launches", "descriptors"),
    [
        (90, "pointers", 2 * [*FORWARD, *BACKWARD, ["sum_rows_kernel", None]] + SLAB, 15 * ["none"]),
        (
            90,
            "descriptors",
            FORWARD + BACKWARD + SLAB,
            ["inner", "inner", "columns", "rows", "rows", "columns", "none"],
        ),
    ],
)
def test_launches_compile(capability, how, launches, descriptors, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "0"}
    script = Path(__file__).with_name("grouped_gemm_launches.py")
    environment["PYTHONPATH"] = os.pathsep.join([str(script.parents[1]), environment.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, str(script), str(capability), how],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    said = json.loads(ran.stdout.splitlines()[-1])
    assert [launch[:2] for launch in said] == launches
    assert [launch[2] for launch in said] == descriptors
