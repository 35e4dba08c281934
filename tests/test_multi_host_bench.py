"""`moecomm bench` between hosts as a user starts it, by torchrun and by mpirun; tiny sizes, nothing about time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moecomm.bench.mpi import mpirun
from moecomm.errors import TransportUnavailable
from moecomm.testing.hosts import Hosts, why_not
from moecomm.transports.ucx_library import find_library

ROOT = Path(__file__).parents[1]
SIZES = ("--hidden", "64", "--experts", "8", "--topk", "3", "--iterations", "2")


@pytest.fixture(autouse=True)
def _where_there_can_be_hosts():
    reason = find_library().problem or why_not(limits=True)
    if reason:
        pytest.skip(reason)


def test_torchrun_in_every_host(tmp_path):
    figures = tmp_path / "figures.json"
    program = ("-m", "moecomm", "bench", *SIZES, "--tokens", "50", "--routing", "limited:1", "--against", "gloo")
    with Hosts((2, 1), rate="1gbit") as hosts:
        started = [
            hosts.start(
                *(host, hosts.torchrun(host, 29600, *program, "--json", str(figures), "--timeout", "60")),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for host in range(hosts.num_hosts)
        ]
        printed = [process.communicate(timeout=90)[0].decode() for process in started]
        assert [process.returncode for process in started] == [0, 0], printed
    assert "3 ranks on 2 hosts (2 + 1)" in printed[0]
    assert "all answers are right" in printed[0]
    assert "answers" not in printed[1]
    records = {(one["op"], one["backend"]): one for one in json.loads(figures.read_text())}
    assert len(records) == 6
    for one in records.values():
        assert one["wrong"] == 0
        assert one["hosts"] == [0, 0, 1]
        assert one["link_fraction"] > 0
        assert one["hop_ratio"] > 0
        # 150 tokens of which about half go to the other host, with one row of 128 bytes at least.
        times = 2 if one["op"] == "pair" else 1
        assert 20 * 128 * times < one["needed_bytes"] < 100 * 128 * times
        assert one["wire_ratio"] > 1


def test_the_benchmark_of_the_targets(tmp_path):
    try:
        mpirun()
    except TransportUnavailable as error:
        pytest.skip(str(error))
    figures = tmp_path / "figures.json"
    script = [sys.executable, str(ROOT / "benchmarks" / "hosts.py"), *SIZES, "--tokens", "40", "--only", "exchange"]
    done = subprocess.run(
        [*script, "--json", str(figures)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all answers are right" in done.stdout
    found = json.loads(figures.read_text())
    records = {(one["op"], one["backend"]): one for one in found["records"]}
    assert {backend for _, backend in records} == {"moecomm", "direct", "per_host", "gloo", "mpi"}
    assert {one["wrong"] for one in records.values()} == {0}
    values = {one["what"]: one["found"] for one in found["targets"]}
    assert values["dispatch: gloo / ours"].endswith("s)")
    assert float(values["dispatch: bytes on the interface / needed"]) > 1
    assert values["low latency, 8 tokens, pair: Open MPI / ours"] == "not measured"
