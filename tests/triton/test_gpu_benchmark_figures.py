"""The figures of the GPU benchmark: bytes and FLOPs, goals, JSON, how time is shared out, what events stand around."""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

import report
import run
import sizes
import timing

TIMES = timing.Timing(median_us=200.0, p90_us=250.0, repetitions=9)


def test_bytes_and_flops_by_hand():
    row_bytes = 7168 * 2
    assert sizes.push_bytes(4096, 4096 * 8, row_bytes) == 4096 * 14336 + 32768 * 14336 == 528_482_304
    assert sizes.combine_bytes(4096, 4096 * 8, row_bytes) == 528_482_304
    assert sizes.low_latency_bytes(8 * 128, 8 * 128 * 8, row_bytes) == 264_241_152
    assert sizes.product_flops(3, 5, 7) == 2 * 3 * 5 * 7
    # Gate, up and down: three matrices of H x I.
    assert sizes.swiglu_flops(32768, 7168, 2048) == 3 * 2 * 32768 * 7168 * 2048
    assert sizes.layer_flops(4, 2, 3, 5, 7) == 3 * (6 * 8 * 5 * 7 + 2 * 4 * 5 * 3)
    assert sizes.weight_bytes(32 * 4096 * 7168, 2) == 1_879_048_192


def test_loads_keep_the_number_of_rows():
    assert sizes.row_counts("balanced", 12, 4) == [3, 3, 3, 3]
    assert sizes.row_counts("zipf", 25, 4) == [12, 6, 4, 3]
    assert sum(sizes.row_counts("zipf", 32768, 8)) == 32768
    with pytest.raises(ValueError, match="load must be 'balanced' or 'zipf', got 'hot'"):
        sizes.row_counts("hot", 4, 2)


def test_rates_fractions_and_goals_of_made_up_times():
    copy = report.compared("rows", "push", "s", TIMES, bound="copy", bound_us=180.0, goal=0.85, num_bytes=600_000_000)
    assert copy.gbps == pytest.approx(3000.0)
    assert copy.tflops is None
    assert copy.fraction == pytest.approx(0.9)
    assert copy.is_met is True
    missed = report.compared("gemm", "f", "s", TIMES, bound="dense", bound_us=100.0, goal=0.85, flops=140_000_000_000)
    assert missed.tflops == pytest.approx(700.0)
    assert (missed.fraction, missed.is_met) == (0.5, False)
    pair = report.compared("low_latency", "pair", "s", TIMES, bound="floor", bound_us=80.0, goal=2.0, goal_is="at most")
    assert (pair.fraction, pair.is_met) == (2.5, False)
    cells = [
        dict(zip((c.name for c in report.table([])[0]), line, strict=True)) for line in report.table([copy, pair])[1]
    ]
    assert (cells[0]["median"], cells[0]["p90"], cells[0]["rate"]) == ("200.0 us", "250.0 us", "3000 GB/s")
    assert (cells[0]["is"], cells[0]["goal"]) == ("0.90", "0.85 met")
    assert (cells[1]["is"], cells[1]["goal"]) == ("2.50", "at most 2 missed")


def test_json_has_every_field_and_comes_back():
    records = [
        report.compared("rows", "push", "8 x 4096", TIMES, bound="copy", bound_us=150.0, num_bytes=10, wrong=0),
        report.unmeasured("links", "push", "x", "not measured: no CuPy"),
    ]
    text = report.to_json({"device": "made up", "driver": "1.0"}, records)
    found = json.loads(text)
    assert found["device"] == "made up"
    assert {
        *("part", "what", "shape", "median_us", "p90_us", "repetitions", "gbps", "tflops"),
        *("bound", "bound_us", "fraction", "goal", "goal_is", "goal_met", "wrong", "note", "is_error"),
    } <= set(found["records"][0])
    assert report.merged(text) == records
    assert not report.is_bad(records)
    assert report.is_bad([report.unmeasured("x", "x", "", "broke", is_error=True)])
    assert report.verdict([report.checked("x", "x", "", 3)]) == "1 answers checked, 3 wrong elements"
    assert report.verdict(records) == "1 answers checked, none wrong; 1 not measured"


def test_a_part_that_hangs_keeps_what_it_found(monkeypatch):
    def hang(command, *, timeout, **_):
        path = Path(command[command.index("--json") + 1])
        path.write_text(report.to_json({}, [report.checked("rows", "push", "", 0)]))
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    args = SimpleNamespace(seconds=1.0, quick=True, json=None)
    first, second = run._in_a_process("rows", 0.5, args, 3)
    assert first == report.checked("rows", "push", "", 0)
    assert second.is_error
    assert "had not ended" in second.note


def test_time_that_is_left_goes_to_later_parts():
    assert sum(run.PARTS.values()) == pytest.approx(1.0)
    shared = list(run._shared_out(time.monotonic() + 100.0))
    assert [part for part, _ in shared] == list(run.PARTS)
    assert shared[0][1] == pytest.approx(100 * run.PARTS["checks"], rel=0.05)
    assert shared[-1][1] == pytest.approx(100, rel=0.05)
    assert list(run._shared_out(time.monotonic() - 1.0))[-1][1] == 0


class FakeCuda:
    """Stands for torch.cuda: notes what it is asked for, in order."""

    def __init__(self):
        self.log = []
        self.stack = ["current"]

    def get_device_properties(self, device):
        return SimpleNamespace(L2_cache_size=1 << 10)

    def _sleep(self, cycles):
        self.log.append("spin")

    def synchronize(self, device=None):
        self.log.append("synchronize")

    def Event(self, enable_timing):
        log = self.log
        return SimpleNamespace(
            record=lambda: log.append("record"), synchronize=lambda: None, elapsed_time=lambda other: 0.5
        )

    def Stream(self, device):
        return self._stream(f"stream {sum('made' in entry for entry in self.log)}", made=True)

    def _stream(self, name, *, made=False):
        if made:
            self.log.append(f"made {name}")
        return SimpleNamespace(
            name=name,
            record_event=lambda: f"event of {name}",
            wait_event=lambda event: self.log.append(f"{name} waits for {event}"),
        )

    def current_stream(self, device):
        return self._stream("current")

    @contextlib.contextmanager
    def stream(self, stream):
        self.stack.append(stream.name)
        yield
        self.stack.pop()


@pytest.fixture
def fake(monkeypatch):
    cuda = FakeCuda()
    flush = SimpleNamespace(fill_=lambda value: cuda.log.append("flush"))
    stand_in = SimpleNamespace(cuda=cuda, empty=lambda *args, **kwargs: flush, uint8=torch.uint8)
    monkeypatch.setattr(timing, "torch", stand_in)
    return cuda


def test_events_stand_around_the_step_alone(fake):
    timer = timing.Timer(SimpleNamespace(type="cuda"))
    for waits, before in ((False, ["flush", "spin"]), (True, ["flush"])):
        fake.log.clear()
        times = timer.measure(lambda: fake.log.append("step"), seconds=0.0, waits=waits)
        assert fake.log == [
            *("step", "step", "synchronize", "step", "synchronize"),
            *[*before, "record", "step", "record"] * 7,
            "synchronize",
        ]
        assert times == timing.Timing(500.0, 500.0, 7)


def test_streams_begin_together_and_are_joined(fake):
    timer = timing.Timer(SimpleNamespace(type="cuda"))
    fake.log.clear()
    phases = [lambda rank, phase=phase: fake.log.append(f"{phase}{rank} on {fake.stack[-1]}") for phase in "ab"]
    timer.on_streams(phases, 2)
    assert fake.log == [
        *("made stream 0", "made stream 1"),
        *("stream 0 waits for event of current", "stream 1 waits for event of current"),
        *("a0 on stream 0", "a1 on stream 1", "b0 on stream 0", "b1 on stream 1"),
        *("current waits for event of stream 0", "current waits for event of stream 1"),
    ]
