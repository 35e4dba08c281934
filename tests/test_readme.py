"""The README keeps its word: its Python blocks run, its commands exist, its Makefile targets exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
PYTHON_BLOCKS = [text for language, text in BLOCKS if language == "python"]
SHELL_BLOCKS = [text for language, text in BLOCKS if language == "sh"]


def test_there_is_an_example_of_about_fifteen_lines():
    assert PYTHON_BLOCKS
    assert PYTHON_BLOCKS[0].count("\n") <= 25


@pytest.mark.parametrize("number", range(len(PYTHON_BLOCKS)))
def test_python_blocks_run_as_they_are(number, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(PYTHON_BLOCKS[number])
    subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        check=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"\bmake ([a-z]+)\b", "".join(SHELL_BLOCKS)))
    assert {"demo", "test"} <= named
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in named), named


def test_commands_of_the_readme_exist():
    named = set(re.findall(r"\bmoecomm (info|bench|demo)\b", README))
    assert named == {"info", "bench", "demo"}
    for command in sorted(named):
        subprocess.run(
            [sys.executable, "-m", "moecomm", command, "--help"],
            check=True,
            capture_output=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
