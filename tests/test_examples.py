"""Every example runs, in two processes, within a deadline, and says what it should."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from moecomm.testing import launch

EXAMPLES = Path(__file__).parent.parent / "examples"
PRINTED = {
    "activation_checkpointing.py": r"rank 0: recomputed, same gradients",
    "decode.py": r"rank 0: \d+ tokens, \d+ rows for its experts, \d+ us per step",
    "dispatch_combine.py": r"rank 0: rows for experts \[0, 1\]: \[\d+, \d+\]",
    "overlap_async.py": r"rank 0: overlapped two halves of 512 tokens",
    "ranks_in_one_process.py": r"rank 3: rows per expert \[4\]",
    "save_and_load.py": r"rank 0: 17 tensors, the same outputs on one rank",
    "train_moe_layer.py": r"step 100  loss 0\.\d+",
    "two_batch_overlap.py": r"rank 0: two micro-batches through 10 layers",
}


def run_example(group, path):
    """Runs a script as torchrun would, in a process that has joined its group already."""
    import torch.distributed as dist

    patched = pytest.MonkeyPatch()
    with patched.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(dist, "init_process_group", lambda backend: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def environment():
    variables = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    variables["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES.parent), variables.get("PYTHONPATH", "")])
    return variables


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == PRINTED.keys()


@pytest.mark.parametrize("name", sorted(PRINTED.keys() - {"ranks_in_one_process.py"}))
def test_example(name):
    outputs = launch(run_example, 2, str(EXAMPLES / name), backend="processes", timeout=60)
    assert re.search(PRINTED[name], outputs[0]), outputs


def test_training_example_learns():
    outputs = launch(run_example, 2, str(EXAMPLES / "train_moe_layer.py"), backend="processes", timeout=60)
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", outputs[0])]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("ranks_in_one_process.py", []),
        ("dispatch_combine.py", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]),
    ],
)
def test_example_as_its_docstring_says(name, launcher):
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTED[name], done.stdout)
