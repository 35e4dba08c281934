"""The GPU benchmark's links without a GPU: real processes on the stand-in device, gloo in the place of NCCL."""

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

import late_links
import links
import report
import sizes
import timing
from context import Context
from link_ranks import on_gpu, on_host

NCCL = "NCCL all_to_all_single"


def context_of(seconds=60.0):
    return Context(
        "links", timing.Timer(torch.device("cpu")), sizes.TINY, 7, 0.01, time.monotonic() + seconds, lambda record: None
    )


def rehearse(monkeypatch, measure, **options):
    monkeypatch.setattr(links, "measure", measure)
    context = context_of()
    links.run_processes(context, "2 GPUs", 2, on_host, **{"transport": "nvlink", "collective": "gloo"} | options)
    return context.records


def test_processes_with_cpu_tensors():
    context = context_of()
    links.run(context)
    lines = [(record.what, record.bound, record.wrong) for record in context.records]
    assert lines == [
        (f"{what}, {mode}, shm", "gloo all_to_all_single", 0)
        for mode in ("throughput", "low_latency")
        for what in ("dispatch", "combine")
    ]
    assert all(record.fraction > 0 and record.repetitions >= 5 for record in context.records)


def test_the_command_rehearses_a_part():
    command = [
        sys.executable,
        str(Path(links.__file__).with_name("run.py")),
        "--interpret",
        "--only",
        "links",
        "--json",
        "-",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    records = json.loads(ended.stdout)["records"]
    assert [record["wrong"] for record in records] == [0] * 4


def test_processes_on_the_stand_in_device(monkeypatch):
    records = rehearse(monkeypatch, late_links.measure_late)
    assert [record.note for record in records] == [None] * 14
    assert [record.wrong for record in records] == [0] * 14
    lines = [(record.what, record.bound) for record in records[:7]]
    theirs, copies = "gloo all_to_all_single", "copies of as many bytes"
    assert lines == [
        ("copies to all ranks", None),
        ("dispatch, throughput, nvlink", copies),
        (f"dispatch, throughput, {theirs}", copies),
        ("dispatch, throughput, nvlink", theirs),
        ("combine, throughput, nvlink", copies),
        (f"combine, throughput, {theirs}", copies),
        ("combine, throughput, nvlink", theirs),
    ]
    toy = sizes.TINY.exchange
    for record, tokens in ((records[0], sizes.TINY.tokens), (records[7], sizes.TINY.decode_tokens)):
        assert 0 < record.bytes <= tokens * toy.num_topk * toy.hidden * 2
    # Two on one GPU, where NCCL does not take part.
    alone = rehearse(monkeypatch, late_links.measure_late, collective=None)
    assert [record.bound for record in alone[:3]] == [None, copies, copies]
    assert len(alone) == 6


def test_wrong_answers_are_counted(monkeypatch):
    records = rehearse(monkeypatch, late_links.measure_spoiled)
    assert report.is_bad(records)
    wrong = {record.what: record.wrong for record in records[:7]}
    assert wrong["copies to all ranks"] in (1, 2)  # what rank 1 sends to rank 0, and to itself if it does
    assert wrong["combine, throughput, nvlink"] > 0
    assert wrong["dispatch, throughput, nvlink"] == 0
    assert wrong["combine, throughput, gloo all_to_all_single"] == 0


def test_what_this_machine_has_not_is_said_and_is_no_error(monkeypatch):
    records = rehearse(monkeypatch, late_links.measure_apart)
    assert len(records) == 2
    assert all("not measured: " in record.note and "cannot address" in record.note for record in records)
    assert not report.is_bad(records)


def test_a_process_that_dies_is_an_error(monkeypatch):
    records = rehearse(monkeypatch, late_links.measure_and_die, transport="auto")
    assert len(records) == 2
    assert all(record.is_error and "rank 1 failed: RankDied" in record.note for record in records)


@pytest.mark.parametrize(("count", "index"), [(1, 0), (3, 1)])
def test_who_takes_part(monkeypatch, count, index):
    started = []

    def started_with(context, where, num_ranks, device_of, *, transport, collective):
        assert isinstance(device_of, partial)
        assert device_of.func is on_gpu
        started.append((where, num_ranks, device_of.args[0], transport, collective))

    monkeypatch.setattr(links, "run_processes", started_with)
    monkeypatch.setattr(links, "run_pairs", lambda context, num_ranks, devices: started.append((num_ranks, devices)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    context = context_of()
    context.timer.is_gpu, context.timer.device = True, torch.device("cuda", index)
    monkeypatch.setattr(context.timer, "synchronize", lambda: None)
    links.run(context)
    together = [("3 GPUs", 3, (1, 0, 2), "nvlink", "nccl")] if count > 1 else []
    assert started == [
        *together,
        ("2 processes in turn on 1 GPU", 2, (index, index), "nvlink", None),
        *((num_ranks, [context.device] * num_ranks) for num_ranks in (1, 2)),
    ]
    notes = [(record.what, record.note) for record in context.records]
    assert notes == (
        [] if count > 1 else [(NCCL, "not measured: there is one GPU, and NCCL takes no two ranks on one")]
    )
