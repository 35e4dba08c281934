"""Measures the project's targets and prints them as a table: `python benchmarks/targets.py [--seconds 10]`.

Every case is measured twice, against competitors written as frameworks write them and against tuned ones (see
docs/benchmark.md). About four minutes on two quiet cores; every answer is checked. Status 1 if one is wrong.
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


def measure(case: dict, competitors: str, backends: Sequence[str], seconds: float) -> dict[tuple[str, str], Record]:
    """Records of one case by (op, backend)."""
    config = BenchConfig(
        **case,
        hidden=HIDDEN,
        experts=EXPERTS,
        topk=TOPK,
        backends=tuple(backends),
        competitors=competitors,
        seconds=seconds,
    )
    return {(record.op, record.backend): record for record in make_records(config, run_ranks(config))}


def targets(main: dict, one: dict, crowded: dict) -> list[tuple[str, str, str]]:
    """What, at least how much, and what was found."""

    def ratio(records: dict, op: str, backend: str) -> str:
        if (op, backend) not in records:
            return "not measured"
        theirs, ours = records[op, backend].summary.median_us, records[op, "moecomm"].summary.median_us
        return f"{theirs / ours:.3g} ({format_us(theirs)} / {format_us(ours)})"

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


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="timed part of each of the six runs")
    args = parser.parse_args()
    console = Console()
    backends = ["moecomm", "gloo", "mpi"]
    try:
        mpirun()
    except TransportUnavailable as error:
        console.warning(f"skipped: {error}")
        backends.remove("mpi")
    columns, wrong = [], 0
    for competitors in ("framework", "tuned"):
        cases = [
            measure(MAIN, competitors, backends, args.seconds),
            measure(ONE_TOKEN, competitors, backends[:2], args.seconds / 2),
            measure(CROWDED, competitors, backends[:2], args.seconds),
        ]
        wrong += sum(record.wrong or 0 for case in cases for record in case.values())
        columns.append(targets(*cases))
    rows = [[what, least, framework, tuned] for (what, least, framework), (_, _, tuned) in zip(*columns, strict=True)]
    headings = ("what", "at least", "competitors as frameworks write them", "competitors tuned")
    console.table([Column(name) for name in headings], rows)
    console.line("all answers are right" if not wrong else f"{wrong} wrong elements")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
