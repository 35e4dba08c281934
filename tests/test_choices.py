"""Measured choices: made once, kept on disk, safe between processes, and possible without a disk."""

import json
import math
import subprocess
import sys
import time

import pytest

import moecomm.kernels.choices as choices_module
from moecomm.kernels.choices import Choices, cache_folder

TIMES = {"slow": 3.0, "fast": 1.0, "broken": math.inf}
KEY = {"device": "a", "sizes": [1, 2]}


class Stopwatch:
    def __init__(self, times=TIMES):
        self.times = times
        self.asked = []

    def __call__(self, candidate):
        self.asked.append(candidate)
        return self.times[candidate]


def test_the_fastest_is_measured_once_and_found_again(tmp_path):
    stopwatch = Stopwatch()
    choices = Choices(tmp_path)
    for _ in range(2):
        assert choices.choose(KEY, list(TIMES), stopwatch) == "fast"
    assert stopwatch.asked == list(TIMES)
    assert Choices(tmp_path).choose(dict(reversed(KEY.items())), list(TIMES), stopwatch) == "fast"
    assert len(stopwatch.asked) == len(TIMES), "the next process reads what the first one found"
    assert Choices(tmp_path).choose({**KEY, "device": "b"}, list(TIMES), stopwatch) == "fast"
    assert len(stopwatch.asked) == 2 * len(TIMES), "another device is measured anew"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda entry: "{",
        lambda entry: "[]",
        lambda entry: "",
        lambda entry: json.dumps({**entry, "key": "another"}),
        lambda entry: json.dumps({**entry, "choice": "gone"}),
    ],
)
def test_a_file_that_does_not_fit_is_replaced(tmp_path, spoil):
    Choices(tmp_path).choose(KEY, list(TIMES), Stopwatch())
    (path,) = tmp_path.iterdir()
    whole = path.read_text()
    path.write_text(spoil(json.loads(whole)))
    stopwatch = Stopwatch()
    assert Choices(tmp_path).choose(KEY, list(TIMES), stopwatch) == "fast"
    assert len(stopwatch.asked) == len(TIMES)
    assert [path.read_text() for path in tmp_path.iterdir()] == [whole]


def test_without_a_disk_it_is_measured_in_every_process(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    stopwatch = Stopwatch()
    for _ in range(2):
        choices = Choices(blocked / "choices")
        for _ in range(2):
            assert choices.choose(KEY, list(TIMES), stopwatch) == "fast"
    assert len(stopwatch.asked) == 2 * len(TIMES)


def test_nothing_that_can_be_measured_means_the_first(tmp_path):
    stopwatch = Stopwatch(dict.fromkeys(TIMES, math.inf))
    assert Choices(tmp_path).choose(KEY, list(TIMES), stopwatch) == "slow"
    assert list(tmp_path.iterdir()) == []


# The module alone: the package would take seconds to import.
RACER = f"""
import runpy, sys, time
from pathlib import Path
Choices = runpy.run_path({choices_module.__file__!r})["Choices"]
folder, begin, own = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
for round in range(100):
    times = [2.0] * 4
    times[(own + round) % 4] = 1.0
    time.sleep(max(0.0, begin - time.time()))
    chosen = Choices(folder).choose({{"round": round}}, [[i, "x" * 1000] for i in range(4)], lambda c: times[c[0]])
    assert chosen[0] in range(4) and len(chosen[1]) == 1000
"""


def test_processes_that_race_leave_whole_files(tmp_path):
    begin = time.time() + 1.0
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, str(tmp_path), str(begin), str(own)], stderr=subprocess.PIPE)
        for own in range(3)
    ]
    for racer in racers:
        _, said = racer.communicate(timeout=60)
        assert racer.returncode == 0, said.decode()
    files = list(tmp_path.iterdir())
    assert len(files) == 100, "one file per key, no remains of writing"
    for path in files:
        assert json.loads(path.read_text())["choice"][0] in range(4)


def test_the_folder_follows_the_standard(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "moecomm" / "choices"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unset in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache_folder() == tmp_path / "home" / ".cache" / "moecomm" / "choices"
