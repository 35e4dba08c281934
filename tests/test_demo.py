"""The whole demo, in its short form, as a person runs it."""

import re
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_demo_learns_and_agrees_with_its_replay(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "moecomm",
            "demo",
            "--short",
            "--steps",
            "60",
            "--no-bench",
            "--output",
            str(tmp_path / "out"),
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    held_out, bigram = re.search(r"held out +(\d\.\d+) nats per byte; .*bigram (\d\.\d+)", done.stdout).groups()
    assert float(held_out) < float(bigram) - 0.05
    assert "the losses agree" in done.stdout
    assert re.search(r"communication +\d+\.\d % of the time in dispatch and combine over shm", done.stdout)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"experts.png", "loss.png", "model.pt"}
    assert not done.stderr
