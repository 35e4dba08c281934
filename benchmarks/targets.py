"""Measures the project's targets and prints them as a table: `python benchmarks/targets.py [--mode low_latency]`.

Every case is measured twice, against competitors written as frameworks write them and against tuned ones (see
docs/benchmark.md). About four minutes per mode on two quiet cores; every answer is checked. Status 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from moecomm.bench import BenchConfig, Record, make_records, run_ranks
from moecomm.bench.mpi import mpirun
from moecomm.bench.report import format_us
from moecomm.cli.console import Column, Console
from moecomm.errors import TransportUnavailable

HIDDEN, EXPERTS, TOPK = 2048, 32, 8
MAIN = {"ranks": 2, "tokens": (2048,)}
ONE_TOKEN = {"ranks": 2, "tokens": (1,)}
CROWDED = {"ranks": 4, "tokens": (2048,)}
LOW_LATENCY = {"ranks": 2, "mode": "low_latency"}
LOW_LATENCY_CROWDED = {"ranks": 4, "tokens": (8,), "mode": "low_latency"}
LONG = 10_000


Records = dict[tuple[str, str], Record]


def measure(
    case: dict, competitors: str, backends: Sequence[str], seconds: float, iterations: int | None = None
) -> Records:
    """Records of one case by (op, backend)."""
    config = BenchConfig(
        **case,
        hidden=HIDDEN,
        experts=EXPERTS,
        topk=TOPK,
        backends=tuple(backends),
        competitors=competitors,
        seconds=seconds,
        iterations=iterations,
    )
    return {(record.op, record.backend): record for record in make_records(config, run_ranks(config))}


def ratio(records: Records, op: str, backend: str) -> str:
    """Their median over ours, and both; on a busy machine the ratio of minima says more."""
    if (op, backend) not in records:
        return "not measured"
    theirs, ours = records[op, backend].summary, records[op, "moecomm"].summary
    times = f"{format_us(theirs.median_us)} / {format_us(ours.median_us)}"
    return f"{theirs.median_us / ours.median_us:.3g} ({times}; of minima {theirs.min_us / ours.min_us:.3g})"


def throughput_targets(main: Records, one: Records, crowded: Records) -> list[tuple[str, str, str]]:
    """What, at least how much, and what was found."""
    pair, dispatch = main["pair", "moecomm"], main["dispatch", "moecomm"]
    memory = "not known" if dispatch.memory is None else f"{dispatch.memory / (2 * dispatch.bytes):.3f}"
    return [
        ("dispatch, gloo / ours", "40", ratio(main, "dispatch", "gloo")),
        ("dispatch, Open MPI / ours", "10", ratio(main, "dispatch", "mpi")),
        ("combine (weighted), gloo / ours", "25", ratio(main, "combine", "gloo")),
        ("pair, fraction of the memory bound", "0.5", f"{pair.bound_fraction:.2f}"),
        ("1 token per rank, pair, gloo / ours", "10", ratio(one, "pair", "gloo")),
        ("receive memory / (rows x row bytes x tensors alive)", "at most 1.25", memory),
        ("4 ranks, dispatch, gloo / ours", "25", ratio(crowded, "dispatch", "gloo")),
    ]


def low_latency_targets(one: Records, eight: Records, long: Records, crowded: Records) -> list[tuple[str, str, str]]:
    """What, at least how much, and what was found."""
    pair, often = eight["pair", "moecomm"], long["pair", "moecomm"]
    floor, spread = "not measured", f"{often.summary.p99_us / often.summary.median_us:.2f}"
    if pair.floor_us is not None and pair.floor_ratio is not None:
        floor = f"{pair.floor_ratio:.2f} ({format_us(pair.summary.median_us)} / {format_us(pair.floor_us)})"
    if often.idle is not None:
        spread += f" (idle loop {often.idle.p99_us / often.idle.median_us:.2f}; {often.summary.iterations} pairs)"
    return [
        ("1 token, pair, gloo / ours", "30", ratio(one, "pair", "gloo")),
        ("1 token, pair, Open MPI / ours", "2", ratio(one, "pair", "mpi")),
        ("8 tokens, pair, Open MPI / ours", "2", ratio(eight, "pair", "mpi")),
        ("8 tokens, pair, time / floor", "at most 3", floor),
        ("8 tokens, pair, throughput / low latency", "2", ratio(eight, "pair", "throughput")),
        ("8 tokens, pair, p99 / p50", "at most 3", spread),
        ("4 ranks, 8 tokens, pair, gloo / ours", "15", ratio(crowded, "pair", "gloo")),
    ]


def measure_throughput(competitors: str, others: Sequence[str], seconds: float) -> list[Records]:
    """The cases of `throughput_targets`."""
    return [
        measure(MAIN, competitors, ["moecomm", *others], seconds),
        measure(ONE_TOKEN, competitors, ["moecomm", "gloo"], seconds / 2),
        measure(CROWDED, competitors, ["moecomm", "gloo"], seconds),
    ]


def measure_low_latency(competitors: str, others: Sequence[str], seconds: float) -> list[Records]:
    """The cases of `low_latency_targets`."""
    everybody = ["moecomm", "throughput", *others]
    return [
        measure(LOW_LATENCY | {"tokens": (1,)}, competitors, everybody, seconds),
        measure(LOW_LATENCY | {"tokens": (8,)}, competitors, everybody, seconds),
        measure(LOW_LATENCY | {"tokens": (8,)}, competitors, ["moecomm"], 6 * seconds, iterations=LONG),
        measure(LOW_LATENCY_CROWDED, competitors, ["moecomm", "gloo"], seconds),
    ]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="timed part of each run")
    parser.add_argument("--mode", choices=("throughput", "low_latency"), help="only the targets of one mode")
    args = parser.parse_args()
    console = Console()
    others = ["gloo", "mpi"]
    try:
        mpirun()
    except TransportUnavailable as error:
        console.warning(f"skipped: {error}")
        others.remove("mpi")
    modes = {
        "throughput": (measure_throughput, throughput_targets),
        "low_latency": (measure_low_latency, low_latency_targets),
    }
    headings = ("what", "at least", "competitors as frameworks write them", "competitors tuned")
    wrong = 0
    for mode, (measure_cases, targets) in modes.items():
        if args.mode not in (None, mode):
            continue
        columns = []
        for competitors in ("framework", "tuned"):
            cases = measure_cases(competitors, others, args.seconds)
            wrong += sum(record.wrong or 0 for case in cases for record in case.values())
            columns.append(targets(*cases))
        rows = [[what, least, found, tuned] for (what, least, found), (_, _, tuned) in zip(*columns, strict=True)]
        console.table([Column(name) for name in headings], rows, title=f"Targets of mode {mode}")
    console.line("all answers are right" if not wrong else f"{wrong} wrong elements")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
