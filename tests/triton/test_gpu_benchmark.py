"""The GPU benchmark without a GPU: its checks, interpreted, find what is broken; its measuring paths are rehearsed."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

import check_captured
import check_experts
import check_low_latency
import check_rows
import checks
import gemm
import layer
import low_latency
import rows
import run
import sizes
import timing
from captured_replay import MODULES as CAPTURED
from context import Context
from exchange import run_pairs
from late_device import LateDevice

from moecomm.errors import TransportUnavailable
from moecomm.kernels import kernels_for
from moecomm.kernels.base import RowKernels
from moecomm.kernels.eager import EagerKernels
from moecomm.kernels.registry import eager_kernels_for
from moecomm.kernels.triton import descriptors, grouped_gemm, runtime, tile_shapes
from moecomm.kernels.triton.captured import CapturedExchange
from moecomm.kernels.triton.rows import TritonRowKernels

CPU = torch.device("cpu")


def context_of(part, *, seconds=60.0):
    return Context(part, timing.Timer(CPU), sizes.TINY, 7, 0.01, time.monotonic() + seconds, lambda record: None)


def methods(protocol):
    return {name for name in vars(protocol) if not name.startswith("_")}


def test_interpreted_checks_cover_every_kernel_and_find_all_right(tmp_path, capsys, monkeypatch):
    launched = set()

    def launch(kernel, *args, **constants):
        launched.add(kernel.fn.__name__)
        runtime.launch(kernel, *args, **constants)

    for module in CAPTURED:
        monkeypatch.setattr(module, "launch", launch)
    described = set()

    def note(x, weight, shape):
        described.add(descriptors.describable(x, weight))
        return descriptors.descriptors_of(x, weight, shape)

    def note_rows(left, right, shape):
        described.add("rows")
        return descriptors.descriptors_of_rows(left, right, shape)

    monkeypatch.setattr(grouped_gemm, "descriptors_of", note)
    monkeypatch.setattr(grouped_gemm, "descriptors_of_rows", note_rows)
    path = tmp_path / "figures.json"
    assert run.main(["--interpret", "--json", str(path)]) == 0
    assert "answers checked, none wrong" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert {"device", "date", "versions", "seed", "seconds"} <= set(found)
    assert {"moecomm", "torch", "triton"} <= set(found["versions"])
    wrong = {record["what"]: record["wrong"] for record in found["records"]}
    assert set(wrong.values()) == {0}
    kernels = methods(RowKernels) | methods(EagerKernels) | {"signal", "wait", "grouped_gemm", "grouped_swiglu"}
    assert kernels | {"captured dispatch", "captured combine", "static dispatch", "static combine"} <= set(wrong)
    assert described == {"inner", "columns", "rows"}
    known = [module for module in CAPTURED if module.__name__.split(".")[-1].startswith("captured_")]
    assert {case.kernel.fn.__name__ for module in known for case in module.compile_cases()} <= launched
    # What there was no time for is not right.
    assert run.main(["--interpret", "--seconds", "0.001"]) == 1


class Broken:
    """Kernels of which one does its work and then some harm."""

    def __init__(self, kernels, name, harm):
        self._kernels, self._name, self._harm = kernels, name, harm

    def __getattr__(self, name):
        method = getattr(self._kernels, name)
        if name != self._name:
            return method

        def broken(*args, **kwargs):
            return self._harm(method, args, kwargs)

        return broken


def spoil_first(method, args, kwargs):
    result = method(*args, **kwargs)
    if args[0].numel():
        args[0].view(-1)[0] += 1
    return result


def spoil_result(method, args, kwargs):
    result = method(*args, **kwargs)
    if result.numel():
        result.view(-1)[-1] += 1
    return result


def forget(method, args, kwargs):
    return None


def one_row_on(method, args, kwargs):
    rows_, routes, addresses = args
    return method(rows_, routes, [a + rows_.shape[1] * rows_.element_size() for a in addresses], **kwargs)


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("combine_rows", spoil_first),
        ("plan_expert_major", spoil_result),
        ("pull_values", spoil_result),
        ("push_values", forget),
        ("push_rows", one_row_on),
        ("push_flat_metadata", forget),
    ],
)
def test_a_broken_row_kernel_is_counted_and_no_other(name, harm, monkeypatch):
    # The reference stands for the kernels: what matters is that harm is seen.
    broken = Broken(kernels_for("reference"), name, harm)
    wrong = {}
    for kernel, _, count in check_rows.check(broken, context_of("checks")):
        wrong[kernel] = wrong.get(kernel, 0) + count
    hit = {kernel for kernel, count in wrong.items() if count}
    followers = {"push_values": {"pull_values"}, "push_flat_metadata": {"pull_flat_values"}}.get(name, set())
    assert {name} <= {kernel.removesuffix(" weighted") for kernel in hit} <= {name} | followers


def test_another_push_is_held_to_the_reference():
    reference = kernels_for("reference")
    harmless = {count for *_, count in check_rows.check_push("push", reference.push_rows, context_of("checks"))}
    assert harmless == {0}

    def into_the_guard(rows_, routes, addresses):
        one_row_on(reference.push_rows, (rows_, routes, addresses), {})

    assert all(count for *_, count in check_rows.check_push("push", into_the_guard, context_of("checks")))


def test_a_broken_low_latency_kernel_is_counted():
    def spoil_counts(method, args, kwargs):
        learned = method(*args, **kwargs)
        return learned._replace(num_tokens_per_expert=learned.num_tokens_per_expert + 1)

    broken = Broken(eager_kernels_for("reference"), "receive_eager", spoil_counts)
    hit = {kernel for kernel, _, count in check_low_latency.check(broken, context_of("checks")) if count}
    assert hit == {"receive_eager"}


def test_a_broken_captured_call_is_counted(monkeypatch):
    right = CapturedExchange.receive

    def broken(self, block):
        right(self, block)
        block.placed.arrived.counts.add_(1)

    monkeypatch.setattr(CapturedExchange, "receive", broken)
    hit = {kernel for kernel, _, count in check_captured.check(context_of("checks")) if count}
    assert hit == {"captured dispatch"}


def test_a_broken_product_is_counted(monkeypatch):
    right = check_experts.grouped_gemm

    def broken(*args, **kwargs):
        out = right(*args, **kwargs)
        out[0] *= 1.25
        return out

    monkeypatch.setattr(check_experts, "grouped_gemm", broken)
    hit = {kernel for kernel, _, count in check_experts.check(context_of("checks")) if count}
    assert hit == {"grouped_gemm", "grouped_gemm, data gradient"}


def test_checks_take_the_default_tiles_unmeasured(monkeypatch):
    monkeypatch.setattr(tile_shapes, "is_interpreted", lambda: False)
    monkeypatch.setattr(tile_shapes, "_capability", lambda device: 90)
    launched = []
    with tile_shapes.default_shapes():
        shape = tile_shapes.choose_shape(
            "plain",
            compute=torch.bfloat16,
            dtypes=(torch.bfloat16,) * 3,
            rows_per_expert=128,
            sizes=(4, 264, 272),
            device=CPU,
            launch=launched.append,
        )
    assert shape == tile_shapes.default_shape("plain", 2, 128, 90)
    assert not shape.uses_descriptors
    with tile_shapes.default_shapes(with_descriptors=True):
        described, plain = (
            tile_shapes.choose_shape(
                "plain",
                compute=torch.bfloat16,
                dtypes=(torch.bfloat16,) * 3,
                rows_per_expert=128,
                sizes=(4, 264, 272),
                device=CPU,
                allows_descriptors=allows,
                launch=launched.append,
            )
            for allows in (True, False)
        )
    assert described.uses_descriptors
    assert plain == shape
    assert not launched


def test_a_wrong_answer_and_a_crash_make_status_1(monkeypatch, capsys):
    def broken(self, *args, **kwargs):
        return torch.full((1, 1), 3)

    def crash(context):
        raise RuntimeError("device lost")

    monkeypatch.setattr(TritonRowKernels, "plan_flat", broken)
    monkeypatch.setattr(checks, "CHECKS", {"row kernels": checks.CHECKS["row kernels"]})
    assert run.main(["--interpret"]) == 1
    told = capsys.readouterr().out
    assert "wrong elements" in told
    assert "plan_flat  3 cases; wrong in no tokens" in told
    monkeypatch.setattr(checks, "CHECKS", {"all": crash})
    assert run.main(["--interpret"]) == 1
    assert "ERROR: RuntimeError: device lost" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main([]) == 2
    assert "there is no CUDA GPU here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "num_records"),
    [(rows, 8), (low_latency, 4), (gemm, 14), (layer, 2)],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_parts_are_rehearsed(part, num_records):
    context = context_of(part.__name__)
    part.run(context)
    assert [record.note for record in context.records] == [None] * num_records
    assert all(record.median_us > 0 for record in context.records)
    checked = [record for record in context.records if record.what != "signal round trip"]
    assert [record.wrong for record in checked] == [0] * len(checked)
    if part is not layer:
        assert any(record.goal is not None for record in checked)


def test_a_spoiled_push_is_seen_at_full_size(monkeypatch):
    right = TritonRowKernels.push_rows

    def broken(self, rows_, routes, addresses, *, weights=None):
        routes = routes.clone()
        routes[1, 0] = routes[0, 0]
        right(self, rows_, routes, addresses, weights=weights)

    monkeypatch.setattr(TritonRowKernels, "push_rows", broken)
    context = context_of("rows")
    rows.run(context)
    assert all(record.wrong > 0 for record in context.records if record.what.startswith("push"))


def test_whole_communicators_are_checked():
    context = context_of("links")
    devices = [LateDevice() for _ in range(2)]
    run_pairs(context, 2, devices)
    (record,) = context.records
    assert record.wrong == 0
    assert record.repetitions == 15
    assert record.bytes == 2 * ((5 + 5 * 2) + (5 * 2 + 5)) * context.sizes.exchange.hidden * 2
    for device in devices:
        device.end()


def test_what_stops_a_case_becomes_a_record():
    context = context_of("rows")

    def stop(error):
        def case():
            raise error

        return case

    assert not context.attempt("a", "", stop(torch.cuda.OutOfMemoryError("big")))
    assert not context.attempt("b", "", stop(AssertionError("odd")))
    missing = TransportUnavailable("cuda", "CuPy is missing", "pip install cupy-cuda13x")
    assert not context.attempt("d", "", stop(missing))
    late = context_of("gemm", seconds=-1.0)
    assert not late.attempt("c", "", stop(KeyError()))
    notes = [(record.note, record.is_error) for record in (*context.records, *late.records)]
    assert notes == [
        ("not measured: not enough memory on the device", False),
        ("AssertionError: odd", True),
        (f"not measured: {missing}", False),
        ("not measured: the part's time is over", False),
    ]
