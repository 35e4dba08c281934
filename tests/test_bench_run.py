"""The benchmark as it is run: real processes, tiny sizes, answers checked; nothing about time is asserted."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from moecomm.bench import BenchConfig, BenchFailed, Routing, make_records, quick_table, run_ranks
from moecomm.bench.barrier import SpinBarrier
from moecomm.bench.dispatchers import dispatcher_class
from moecomm.bench.mpi import mpirun
from moecomm.cli.console import Console
from moecomm.cli.main import main
from moecomm.errors import PeerTimeout, TransportUnavailable

TESTS = str(Path(__file__).parent)
TINY = BenchConfig(
    ranks=2, tokens=(4,), hidden=16, experts=4, topk=2, backends=("gloo",), iterations=2, seconds=5.0, timeout=60.0
)
SIZES = ("--ranks=2", "--tokens=4", "--hidden=16", "--experts=4", "--topk=2")
ARGUMENTS = ["bench", *SIZES, "--iterations=2", "--timeout=60"]


@pytest.fixture(autouse=True)
def _backends_of_these_tests(monkeypatch):
    """So that the ranks find tests/bench_backends.py."""
    monkeypatch.setenv("PYTHONPATH", TESTS)
    monkeypatch.syspath_prepend(TESTS)


def wrong(config):
    return {(r.op, r.backend): r.wrong for r in make_records(config, run_ranks(config))}


def test_the_command_measures_checks_and_writes(tmp_path, capsys):
    figures = tmp_path / "figures.json"
    assert main([*ARGUMENTS, "--against", "gloo", "--json", str(figures)]) == 0
    printed = capsys.readouterr().out
    assert "all answers are right" in printed
    objects = json.loads(figures.read_text())
    assert {(one["op"], one["backend"]) for one in objects} == {
        (op, backend) for op in ("dispatch", "combine", "pair") for backend in ("moecomm", "gloo")
    }
    for one in objects:
        assert one["wrong"] == 0
        assert one["iterations"] == 2
        assert 0 < one["min_us"] <= one["median_us"] <= one["p99_us"]
        assert one["bound_fraction"] > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"competitors": "tuned"},
        {"dtype": "float32", "routing": Routing("masked", 0.5)},
        {"ranks": 3, "experts": 2, "routing": Routing("hot"), "dtype": "float64"},
        {"ranks": 3, "experts": 2, "routing": Routing("masked", 0.5), "competitors": "tuned"},
        {"routing": Routing("masked", 1.0), "tokens": (1, 3)},
    ],
    ids=["tuned", "masked", "more ranks than experts", "tuned, more ranks than experts", "no routes"],
)
def test_competitors_are_right(changes):
    assert set(wrong(dataclasses.replace(TINY, **changes)).values()) == {0}


def test_the_low_latency_mode_is_right():
    config = dataclasses.replace(TINY, backends=("moecomm",), mode="low_latency", tokens=(1, 4))
    assert set(wrong(config).values()) == {0}


def test_mpi_takes_part_where_it_is():
    try:
        mpirun()
    except TransportUnavailable as error:
        pytest.skip(str(error))
    config = dataclasses.replace(TINY, backends=("gloo", "mpi"))
    assert set(wrong(config).values()) == {0}


def test_mpi_is_skipped_with_a_reason_where_it_is_not(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(TransportUnavailable, match=r"no mpirun on PATH.*apt install"):
        mpirun()


def test_a_wrong_element_is_counted_and_the_command_fails(tmp_path, capsys):
    figures = tmp_path / "figures.json"
    assert main([*ARGUMENTS, "--against", "bench_backends:OneElementOff", "--json", str(figures)]) == 1
    assert "error: dispatch of one-off at 4 tokens" in capsys.readouterr().out
    counted = {(one["op"], one["backend"]): one["wrong"] for one in json.loads(figures.read_text())}
    # Once before the timed part and once after it.
    assert counted["dispatch", "one-off"] == 2
    assert counted["dispatch", "moecomm"] == 0


def test_a_wrong_sum_is_counted():
    counted = wrong(dataclasses.replace(TINY, backends=("bench_backends:Doubled",)))
    assert counted["dispatch", "doubled"] == 0
    assert counted["combine", "doubled"] > 0
    assert counted["pair", "doubled"] > 0


def test_without_check_nothing_is_counted():
    assert set(wrong(dataclasses.replace(TINY, check=False)).values()) == {None}


def test_a_failing_rank_shows_its_traceback():
    with pytest.raises(BenchFailed, match="rank 1 of the benchmark failed(.|\n)*the cable is unplugged"):
        run_ranks(dataclasses.replace(TINY, backends=("bench_backends:Raising",)))


def test_a_transport_that_does_not_answer_is_told_without_a_traceback():
    with pytest.raises(BenchFailed, match="transport 'nvlink' is unavailable: .* Remedy: ") as failed:
        run_ranks(dataclasses.replace(TINY, backends=("moecomm",), transport="nvlink"))
    assert "Traceback" not in str(failed.value)


def test_a_rank_that_ends_without_a_word_is_named():
    with pytest.raises(BenchFailed, match="rank 1 ended with status 17"):
        run_ranks(dataclasses.replace(TINY, backends=("bench_backends:Dying",)))


def test_a_run_that_takes_too_long_is_ended():
    with pytest.raises(BenchFailed, match=r"did not end within 0.2 s"):
        run_ranks(dataclasses.replace(TINY, timeout=0.2))


def test_failure_is_exit_status_1():
    done = subprocess.run(
        [sys.executable, "-m", "moecomm", *ARGUMENTS, "--against", "bench_backends:Raising"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 1
    assert "the cable is unplugged" in done.stderr


def test_an_unknown_competitor_is_refused():
    with pytest.raises(ValueError, match="available: direct, gloo, hierarchical, moecomm, mpi, per_host"):
        dispatcher_class("carrier-pigeon")
    with pytest.raises(ValueError, match="not a subclass"):
        dispatcher_class("json:JSONDecoder")


def test_the_quick_table_is_short(capsys):
    records = quick_table(Console(rich=False), tokens=(2,), hidden=8, experts=4, topk=2, seconds=0.2)
    assert len(records) == 6
    assert "moecomm" in capsys.readouterr().out


def test_a_barrier_names_who_is_late(tmp_path):
    barrier = SpinBarrier(tmp_path / "barrier", rank=0, num_ranks=2, timeout=0.05)
    with pytest.raises(PeerTimeout, match=r"ranks \[1\] did not reach barrier 1"):
        barrier.wait()
    barrier.close()
