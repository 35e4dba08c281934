"""How `GroupedExperts(backend="auto")` decides, on tensors that only claim to be on a GPU."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moecomm.kernels.choices import Choices
from moecomm.kernels.experts import ExpertRows, Gathered
from moecomm.nn import backends


class Kernels:
    def __init__(self, reason=None):
        self.reason = reason
        self.version = "1"

    def refusal(self, x, gate_up_proj, down_proj):
        return self.reason


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """What `choose_backend` sees of a GPU; the test fills in kernels and times."""

    gpu = SimpleNamespace(
        kernels={"triton": Kernels(), "torch": Kernels()},
        times={"triton": 1.0, "torch": 2.0},
        timed=[],
        is_capturing=False,
    )

    def kernels_for(name):
        if gpu.kernels[name] is None:
            raise ImportError(f"no module named {name}")
        return gpu.kernels[name]

    def time_of(name, *tensors, down_proj, trains):
        gpu.timed.append((name, trains))
        return gpu.times[name]

    monkeypatch.setattr(backends, "expert_kernels_for", kernels_for)
    monkeypatch.setattr(backends, "_time", time_of)
    monkeypatch.setattr(backends, "_choices", Choices(tmp_path))
    monkeypatch.setattr(backends, "_chosen", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.is_capturing)
    return gpu


def choose(requested="auto", *, num_rows=100, trains=False, device="cuda"):
    with FakeTensorMode():
        x = torch.empty(num_rows, 64, dtype=torch.bfloat16, device=device)
        offsets = torch.empty(4, dtype=torch.int32, device=device)
        gate_up_proj = torch.empty(4, 32, 64, dtype=torch.bfloat16, device=device)
        down_proj = torch.empty(4, 64, 16, dtype=torch.bfloat16, device=device)
        rows = ExpertRows(num_rows, offsets)
        return backends.choose_backend(requested, x, rows, gate_up_proj, down_proj=down_proj, trains=trains)


def test_the_faster_one_is_taken_measured_once_per_family_and_named(gpu, caplog):
    caplog.set_level(logging.INFO, logger="moecomm.nn")
    assert choose() == "triton"
    assert choose(num_rows=128) == "triton"  # 100 and 128 rows of 4 experts are one family
    assert gpu.timed == [("triton", False), ("torch", False)]
    assert [record.getMessage() for record in caplog.records] == [
        "experts of 32 rows each (expert_major), weights [4, 32, 64]: triton (measured)"
    ]
    gpu.times["torch"] = 0.5
    assert choose(num_rows=129) == "torch"
    assert choose(trains=True) == "torch"
    assert gpu.timed[2:] == [("triton", False), ("torch", False), ("triton", True), ("torch", True)]


def test_every_layout_is_measured_by_itself_and_named(gpu, caplog):
    caplog.set_level(logging.INFO, logger="moecomm.nn")
    weights = torch.zeros(4, 32, 64), torch.zeros(4, 64, 16)
    counts, routes = torch.zeros(4, dtype=torch.int32), torch.zeros(50, 2, dtype=torch.int64)
    gathered = Gathered(torch.zeros(100, dtype=torch.int64), routes)
    for number, rows in enumerate(
        (
            ExpertRows(100, counts),
            ExpertRows(100, None, counts, capacity=25),
            ExpertRows(100, counts, gathered=gathered),
            ExpertRows(100, counts, gathered=gathered, row_weights=torch.zeros(100)),
        )
    ):
        gpu.times["torch"] = 0.5 + number % 2
        with FakeTensorMode(allow_non_fake_inputs=True):
            x, gate_up_proj, down_proj = (
                torch.empty(one.shape, device="cuda") for one in (torch.zeros(50, 64), *weights)
            )
            chosen = backends.choose_backend("auto", x, rows, gate_up_proj, down_proj=down_proj, trains=True)
        assert chosen == ("triton" if number % 2 else "torch")
    assert len(gpu.timed) == 8
    for named in ("(expert_major), weights", "(slab), weights", "(flat, 2 choices), weights"):
        assert named in caplog.text


def test_another_process_measures_another_version_only(gpu, monkeypatch):
    assert choose() == "triton"
    monkeypatch.setattr(backends, "_chosen", {})
    assert choose() == "triton"
    assert len(gpu.timed) == 2
    monkeypatch.setattr(backends, "_chosen", {})
    gpu.kernels["triton"].version = "2"
    gpu.times["torch"] = 0.5
    assert choose() == "torch"


def test_nothing_is_measured_while_a_graph_is_captured(gpu):
    gpu.is_capturing = True
    gpu.times["torch"] = 0.5
    assert choose() == "triton"
    assert gpu.timed == []
    gpu.is_capturing = False
    assert choose() == "torch"


@pytest.mark.parametrize("missing", [None, Kernels("such rows are too odd")])
def test_the_one_that_is_able_is_taken_and_the_log_says_why(gpu, caplog, missing):
    caplog.set_level(logging.INFO, logger="moecomm.nn")
    gpu.kernels["triton"] = missing
    assert choose() == "torch"
    reason = "no module named triton" if missing is None else missing.reason
    assert reason in caplog.text
    gpu.kernels["torch"] = missing
    assert choose(num_rows=1) == "loops"
    assert gpu.timed == []
    with pytest.raises(ValueError, match=f"backend 'triton' cannot compute these experts: {reason}"):
        choose("triton")


def test_what_is_asked_for_is_not_measured(gpu):
    for name in ("torch", "triton", "loops"):
        assert choose(name) == name
    assert choose(device="cpu") == "loops"
    assert choose(num_rows=0) == "triton"
    assert gpu.timed == []


def test_times_are_taken_on_the_stream_of_the_tensors_device(monkeypatch):
    """Which need not be the current device, as in a thread of its own."""
    recorded = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            recorded.append(stream)

        def synchronize(self):
            """Nothing runs."""

        def elapsed_time(self, end):
            return 3.0

    class Outputs(Kernels):
        def outputs(self, x, rows, gate_up_proj, down_proj, *, out, keeps_hidden):
            return x, None

    monkeypatch.setattr(backends, "expert_kernels_for", lambda name: Outputs())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    x = torch.empty(8, 4, device="meta")
    rows = ExpertRows(8, torch.empty(1, dtype=torch.int32, device="meta"))
    assert backends._time("triton", x, rows, x, down_proj=x, trains=False) == 3.0
    assert set(recorded) == {"the stream of meta"}
