"""The benchmark of the low-latency mode: tiny runs, checked answers, floor and noise beside them; no time asserted."""

import json

import pytest

from moecomm.bench import BenchConfig, make_records, run_ranks
from moecomm.bench.floor import SignalRing, measure_python, spin
from moecomm.cli.main import main
from moecomm.testing import launch

SIZES = {"hidden": 16, "experts": 4, "topk": 2, "iterations": 3, "seconds": 5.0, "timeout": 60.0}
TINY = BenchConfig(tokens=(1, 4), mode="low_latency", backends=("moecomm", "throughput", "gloo"), **SIZES)


def test_the_command_prints_latencies_floor_and_noise(tmp_path, capsys):
    figures = tmp_path / "figures.json"
    sizes = ["--tokens=1,4", "--hidden=16", "--experts=4", "--topk=2", "--iterations=3", "--timeout=60"]
    command = ["bench", "--mode", "low_latency", *sizes, "--against", "throughput,gloo", "--json", str(figures)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    for expected in ("p99/p50", "x floor", "one way", "noise at 4", "Python", "all answers are right"):
        assert expected in printed, expected
    objects = json.loads(figures.read_text())
    assert len(objects) == 2 * 3 * 3
    for one in objects:
        assert one["mode"] == "low_latency"
        assert one["wrong"] == 0
        assert one["layout"] == ("slab" if one["backend"] == "moecomm" else "expert_major")
        assert one["floor_us"] > one["signal_us"] > 0
        assert one["floor_ratio"] == pytest.approx(one["median_us"] / one["floor_us"])
        assert 0 < one["idle_median_us"] <= one["idle_p99_us"]
        assert one["python_us"] > 0
    pair, dispatch, combine = (
        next(one["floor_us"] for one in objects if one["op"] == op) for op in ("pair", "dispatch", "combine")
    )
    assert pair == pytest.approx(dispatch + combine)


@pytest.mark.parametrize(
    "changes",
    [{"ranks": 1}, {"ranks": 3}, {"bound": False}, {"transport": "collective"}],
    ids=["one rank", "three ranks", "no bound", "no counters"],
)
def test_where_there_is_no_floor_none_is_shown(changes):
    config = BenchConfig(tokens=(2,), mode="low_latency", **SIZES, **changes)
    records = make_records(config, run_ranks(config))
    assert {record.wrong for record in records} == {0}
    has_floor = "ranks" in changes and changes["ranks"] > 1
    assert all((record.floor_us is not None) == has_floor for record in records)
    assert all(record.idle is not None for record in records)


def test_throughput_mode_has_no_floor():
    config = BenchConfig(tokens=(2,), **SIZES)
    (record, *_) = make_records(config, run_ranks(config))
    assert (record.floor_us, record.floor_ratio, record.idle, record.python_us) == (None,) * 4


def pass_signals(group):
    ring = SignalRing(group, transport="auto", timeout=10.0)
    times = [ring.one_way() for _ in range(3)]
    group.all_gather(None)
    ring.close()
    return times


@pytest.mark.parametrize("ranks", [2, 3])
def test_signals_go_round_all_ranks(ranks):
    first, *others = launch(pass_signals, ranks)
    assert min(first) > 0
    assert others == [[0, 0, 0]] * (ranks - 1)


def test_the_idle_loop_lasts_as_long_as_asked():
    assert spin(1000.0) >= 1000


def test_python_is_measured_in_both_modes():
    for mode in ("throughput", "low_latency"):
        assert min(measure_python(BenchConfig(mode=mode)).values()) > 0
