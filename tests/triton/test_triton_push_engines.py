"""Which kernel pushes rows: the choice, on a clock that the test turns, and the push through the twin of the engine."""

import logging
import math

import pytest
import torch
from bulk_twin import COMPILER, build
from bulk_twin import push as push_by_twin
from kernel_cases import assert_same_bits, fresh_memory, ids_of, plans

from moecomm.errors import TransportUnavailable
from moecomm.kernels import kernels_for
from moecomm.kernels.choices import Choices
from moecomm.kernels.triton import push, push_engines
from moecomm.kernels.triton.push_engines import PushCase, PushEngines, forced_engine
from moecomm.testing.contracts import kernels as contract

TRITON = kernels_for("triton")
CUDA = torch.device("cuda", 0)
CASE = PushCase(CUDA, 4096, 8, 14336, 8)


class Clock:
    """Stands for a GPU: what launches take, whether they have ended, what is captured, what can be loaded."""

    def __init__(self):
        self.milliseconds = {"triton": 2.0, "bulk": 1.0}
        self.now = 0.0
        self.passed = math.inf
        self.launched = []
        self.num_loads = 0
        self.refusal = None
        self.is_capturing = False

    def launches(self):
        return {name: lambda name=name: self.launch(name) for name in self.milliseconds}

    def launch(self, name):
        self.now += self.milliseconds[name]
        self.launched.append(name)

    def load(self, device):
        self.num_loads += 1
        if self.refusal is not None:
            raise self.refusal


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            self.at = clock.now

        def query(self):
            return self.at <= clock.passed

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: clock.is_capturing)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(push_engines, "is_interpreted", lambda: False)
    monkeypatch.setattr(push_engines, "load_bulk_push", clock.load)
    return clock


def run(engines, clock, times, case=CASE):
    """What so many pushes went through."""
    clock.launched.clear()
    for _ in range(times):
        assert engines.serve(case, 16)
        engines.run(case, clock.launches())
    return list(clock.launched)


@pytest.mark.parametrize("faster", ["triton", "bulk"])
def test_both_have_their_turns_then_the_faster_is_taken_and_named(clock, tmp_path, caplog, faster):
    caplog.set_level(logging.INFO, logger="moecomm.kernels")
    clock.milliseconds[faster] = 0.5
    engines = PushEngines(Choices(tmp_path))
    assert sorted(run(engines, clock, 12)) == ["bulk"] * 6 + ["triton"] * 6
    assert run(engines, clock, 3) == [faster] * 3
    assert run(engines, clock, 1, CASE._replace(num_tokens=2049)) == [faster], "2049 and 4096 tokens are one family"
    assert f"push of up to 4096 rows of 14336 bytes, 8 slots: {faster} (measured: " in caplog.text
    assert run(PushEngines(Choices(tmp_path)), clock, 2) == [faster] * 2, "the next process reads it"
    assert clock.num_loads == 2, "once per process"
    assert len(set(run(engines, clock, 2, CASE._replace(num_tokens=4097)))) == 2, "other sizes are measured anew"


def test_nobody_waits_for_what_has_not_ended(clock, tmp_path):
    engines = PushEngines(Choices(tmp_path))
    clock.passed = -1.0
    run(engines, clock, 12)
    assert run(engines, clock, 3) == ["triton"] * 3
    assert list(tmp_path.iterdir()) == []
    clock.passed = math.inf
    assert run(engines, clock, 2) == ["bulk"] * 2


def test_a_graph_captures_what_is_known_and_measures_nothing(clock, tmp_path):
    engines = PushEngines(Choices(tmp_path))
    clock.is_capturing = True
    assert not engines.serve(CASE, 16), "nothing can be loaded then"
    clock.is_capturing = False
    assert engines.serve(CASE, 16)
    clock.is_capturing = True
    assert run(engines, clock, 13) == ["triton"] * 13
    clock.is_capturing = False
    run(engines, clock, 13)
    clock.is_capturing = True
    assert run(engines, clock, 1) == ["bulk"]


@pytest.mark.parametrize(
    "refusal", [TransportUnavailable("CUDA kernel push_bulk", "no CuPy.", "Get it."), RuntimeError("does not compile")]
)
@pytest.mark.parametrize(("wanted", "level"), [("auto", logging.DEBUG), ("bulk", logging.WARNING)])
def test_what_cannot_be_built_is_not_used_and_the_log_says_why(clock, caplog, monkeypatch, refusal, wanted, level):
    caplog.set_level(logging.DEBUG, logger="moecomm.kernels")
    monkeypatch.setenv("MOECOMM_PUSH", wanted)
    clock.refusal = refusal
    engines = PushEngines()
    for _ in range(3):
        assert not engines.serve(CASE, 16)
    assert clock.num_loads == 1
    (record,) = caplog.records
    assert record.levelno == level
    assert record.getMessage() == f"rows are pushed by Triton, not by the bulk copy engine: {refusal}"


def test_the_engine_is_for_large_aligned_pushes_on_gpus(clock, monkeypatch):
    engines = PushEngines()
    assert not engines.serve(CASE, 8)
    assert not engines.serve(CASE._replace(device=torch.device("cpu")), 16)
    assert not engines.serve(CASE._replace(num_tokens=73), 16)
    assert engines.serve(CASE._replace(num_tokens=74), 16), "a mebibyte"
    monkeypatch.setattr(push_engines, "is_interpreted", lambda: True)
    assert not engines.serve(CASE, 16)


def test_the_environment_and_checks_force_one(clock, monkeypatch):
    monkeypatch.setenv("MOECOMM_PUSH", "bulk")
    few = CASE._replace(num_tokens=1)
    assert run(push_engines.engines, clock, 3, few) == ["bulk"] * 3
    with forced_engine("triton"):
        assert not push_engines.engines.serve(CASE, 16)
    monkeypatch.setenv("MOECOMM_PUSH", "triton")
    assert not push_engines.engines.serve(CASE, 16)
    monkeypatch.setenv("MOECOMM_PUSH", "shovel")
    with pytest.raises(ValueError, match="MOECOMM_PUSH is 'shovel'; wanted 'auto', 'triton' or 'bulk'"):
        push_engines.engines.serve(CASE, 16)


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    return build(tmp_path_factory.mktemp("twin"))


@pytest.fixture
def engine(monkeypatch, twin):
    """The row kernels push through the twin all that has no weights; gives the sizes of what it has moved."""
    moved = []

    def launch(rows, routes, table, *, status=None):
        moved.append(tuple(rows.shape))
        assert push_by_twin(twin, rows, routes, table.tolist(), status=status) == ""

    monkeypatch.setattr(PushEngines, "serve", lambda self, case, alignment: True)
    monkeypatch.setattr(push, "launch_bulk_push", launch)
    with forced_engine("bulk"):
        yield moved


def test_through_the_engine_the_contract_is_kept(engine):
    contract.check_pushed_rows(TRITON)
    assert engine, "no case of the contract went through the engine"


@pytest.mark.parametrize("failed", [0, 1])
@pytest.mark.parametrize("layout", ["expert_major", "flat"])
def test_rows_through_the_engine_heed_the_status(engine, layout, failed):
    plan = plans(ids_of(9, 4, 12), torch.arange(12, dtype=torch.int32) // 4, 3, layout)
    x = torch.randn(9, 64)
    status = torch.tensor([failed, 0, 0, 0, 0, 0, 0])
    got, want = (fresh_memory(plan.num_rows, 64, x.dtype) for _ in range(2))
    TRITON.push_rows(x, plan.routes, got.addresses, status=status)
    if not failed:
        kernels_for("reference").push_rows(x, plan.routes, want.addresses)
    assert_same_bits(got.bytes, want.bytes)
    assert engine == [(9, 64)]
