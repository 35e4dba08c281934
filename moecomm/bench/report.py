"""The benchmark's printed report: what is measured, on what, and the table."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from moecomm import _C
from moecomm.bench.config import BenchConfig
from moecomm.bench.records import Record
from moecomm.cli.console import Column, Console
from moecomm.version import __version__

__all__ = ["format_bytes", "format_us", "hops_table", "print_explanation", "print_header", "print_table", "table"]

Number = TypeVar("Number", int, float)

# More load than this per core while nothing of ours runs: something else does.
QUIET_LOAD_PER_CORE = 0.25

COLUMNS = (
    *("tokens", "op", "backend", "via", "min", "median", "p99", "skew", "bytes", "local"),
    *("GB/s", "bound", "of bound", "x ours", "wrong", "iterations"),
)
LOW_LATENCY_COLUMNS = (
    *("tokens", "op", "backend", "via", "min", "p50", "p99", "p99/p50", "skew"),
    *("floor", "x floor", "x ours", "wrong", "iterations"),
)

HOPS_COLUMNS = (
    *("tokens", "op", "backend", "median", "needed", "sent", "on wire", "x needed", "forwarded"),
    *("GB/s", "link", "of link", "hop", "x hop"),
)


def format_us(microseconds: float) -> str:
    """A time in the unit in which it has one to three digits before the point: `12.3 us`, `4.56 ms`, `1.23 s`."""
    for factor, unit in ((1.0, "us"), (1e3, "ms")):
        if microseconds < 999.5 * factor:
            return f"{microseconds / factor:.3g} {unit}"
    return f"{microseconds / 1e6:.3g} s" if microseconds < 999.5e6 else f"{microseconds / 1e6:.0f} s"


def format_bytes(count: int) -> str:
    """A number of bytes in decimal units: `512 B`, `33.5 kB`, `67.1 MB`, `1.2 GB`."""
    for factor, unit in ((1, "B"), (1e3, "kB"), (1e6, "MB")):
        if count < 999.5 * factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count / 1e9:.3g} GB"


def print_header(console: Console, config: BenchConfig) -> None:
    """Print what is measured, where, and what the columns mean."""
    tokens = ", ".join(str(number) for number in config.tokens)
    element = config.row_bytes // config.hidden
    console.line(f"moecomm bench {__version__}: dispatch and combine, {config.mode} mode", style="bold")
    pairs = [
        ("group", f"{_ranks(config)} x {tokens} tokens, {config.torch_threads} torch thread(s) per rank"),
        ("rows", f"{config.hidden} x {config.dtype} = {config.row_bytes} bytes"),
        ("routing", f"{config.routing}, top-{config.topk} of {config.experts} experts, seed {config.seed}"),
        (
            "machine",
            f"{len(os.sched_getaffinity(0))} cores ({platform.machine()}, {_C.instruction_set()}), "
            f"torch {torch.__version__}, Python {platform.python_version()}",
        ),
        (
            "bytes",
            f"dispatch: rows received (one per route) x {config.hidden} x {element}; combine: rows that come back x "
            "the same; pair: both; of the rank that has most, rows it sends itself included (local: their part)",
        ),
        (
            "time",
            "of the slowest rank in each iteration; then min, median, p99 over iterations. skew: slowest rank's "
            "median / fastest rank's. GB/s: bytes / median",
        ),
    ]
    if config.bound:
        pairs.append(
            (
                "bound",
                "the same rows by plain loops, same processes, same run: dispatch reads each row once and writes all "
                "copies with streaming stores; combine reads all rows and writes one per token; pair: both times",
            )
        )
    if config.mode == "low_latency" and config.bound:
        pairs.append(
            (
                "floor",
                "dispatch, combine: one one-way signal (a counter that goes round the ranks) and the bound; pair: both",
            )
        )
    if config.topology.num_hosts > 1:
        pairs.append(
            (
                "hosts",
                "needed: rows that must cross, one per token and host. sent, forwarded (inside the host): by the "
                "counters of moecomm. on wire: by the interfaces; x needed: that over needed; GB/s: that / median. "
                "link: payload rate of plain TCP streams of the needed rows, same run; of link: their time / median. "
                "hop: plain puts of the same rows; x hop: median / their time",
            )
        )
    if len(config.backends) > 1:
        way = {
            "framework": "competitors as frameworks write them: a fresh tensor per step, scatter-add",
            "tuned": "competitors tuned: buffers kept between calls, gathering sum instead of scatter-add",
        }
        pairs.append(("against", f"{way[config.competitors]}. x ours: time / time of moecomm"))
    console.pairs(pairs)
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0]
    if load > QUIET_LOAD_PER_CORE * cores:
        console.warning(
            f"the load average is {load:.1f} on {cores} cores: if other work is running, compare ratios, not times"
        )


def _ranks(config: BenchConfig) -> str:
    topology = config.topology
    if topology.num_hosts == 1:
        return f"{config.ranks} ranks"
    each = [str(len(topology.ranks_on(host))) for host in range(topology.num_hosts)]
    return f"{config.ranks} ranks on {topology.num_hosts} hosts ({' + '.join(each)})"


def _tokens(record: Record) -> int:
    return record.tokens


def table(records: Sequence[Record]) -> tuple[list[Column], list[list[str]]]:
    """The table of `records`: columns, and one line of texts per record."""
    columns = _columns(COLUMNS, "median")
    rows = []
    for record in records:
        summary = record.summary
        rows.append(
            [
                *_times(record),
                f"{summary.skew:.2f}",
                format_bytes(record.bytes),
                format_bytes(record.local_bytes),
                f"{record.gbps:.2f}",
                "-" if record.bound_gbps is None else f"{record.bound_gbps:.2f}",
                "-" if record.bound_fraction is None else f"{100 * record.bound_fraction:.3g} %",
                "-" if record.ratio is None else f"{record.ratio:.3g}",
                "-" if record.wrong is None else str(record.wrong),
                str(summary.iterations),
            ]
        )
    return columns, rows


def _times(record: Record) -> list[str]:
    """The first cells of a line: what was measured, and how long it took."""
    summary = record.summary
    return [
        str(record.tokens),
        record.op,
        record.backend,
        record.transport,
        format_us(summary.min_us),
        format_us(summary.median_us),
        format_us(summary.p99_us),
    ]


def low_latency_table(records: Sequence[Record]) -> tuple[list[Column], list[list[str]]]:
    """The table of `records` of low-latency mode, where latencies and their spread matter and rates do not."""
    rows = []
    for record in records:
        summary = record.summary
        rows.append(
            [
                *_times(record),
                f"{summary.p99_us / summary.median_us:.2f}",
                f"{summary.skew:.2f}",
                "-" if record.floor_us is None else format_us(record.floor_us),
                "-" if record.floor_ratio is None else f"{record.floor_ratio:.3g}",
                "-" if record.ratio is None else f"{record.ratio:.3g}",
                "-" if record.wrong is None else str(record.wrong),
                str(summary.iterations),
            ]
        )
    return _columns(LOW_LATENCY_COLUMNS, "p50"), rows


def hops_table(records: Sequence[Record]) -> tuple[list[Column], list[list[str]]]:
    """The table of what crossed between hosts."""
    rows = []
    for record in records:
        hops = record.hops
        if hops is None:
            continue
        rows.append(
            [
                str(record.tokens),
                record.op,
                record.backend,
                format_us(record.summary.median_us),
                format_bytes(hops.needed),
                *(_or_dash(count, format_bytes) for count in (hops.sent, hops.wire)),
                _or_dash(hops.wire_ratio, "{:.3f}".format),
                _or_dash(hops.forwarded, format_bytes),
                _or_dash(hops.wire_gbps, "{:.3f}".format),
                _or_dash(hops.link_gbps, "{:.3f}".format),
                _or_dash(hops.link_fraction, "{:.1%}".format),
                _or_dash(hops.hop_us, format_us),
                _or_dash(hops.hop_ratio, "{:.2f}".format),
            ]
        )
    return _columns(HOPS_COLUMNS, "x needed"), rows


def _or_dash(value: Number | None, text: Callable[[Number], str]) -> str:
    return "-" if value is None else text(value)


def _columns(names: Sequence[str], strong: str) -> list[Column]:
    left = {"op", "backend", "via"}
    return [Column(name, "left" if name in left else "right", "bold" if name == strong else "") for name in names]


def _print_noise(console: Console, records: Sequence[Record]) -> None:
    """What of the latencies is signals, Python, and the machine's own noise."""
    first = records[0]
    pairs = []
    if first.signal_us is not None:
        pairs.append(("signal", f"{format_us(first.signal_us)} one way"))
    if first.python_us is not None:
        python = {record.op: format_us(record.python_us) for record in records if record.python_us is not None}
        texts = ", ".join(f"{op} {text}" for op, text in python.items())
        pairs.append(("Python", f"{texts}: the same calls on one rank, one token of one element"))
    for record in records:
        if record.op == "pair" and record.backend == "moecomm" and record.idle is not None:
            idle, ours = record.idle, record.summary
            pairs.append(
                (
                    f"noise at {record.tokens}",
                    f"a loop that only reads the clock for {format_us(idle.median_us)}: p99/p50 "
                    f"{idle.p99_us / idle.median_us:.2f}; moecomm's pair: {ours.p99_us / ours.median_us:.2f}",
                )
            )
    console.pairs(pairs)


def print_explanation(console: Console, config: BenchConfig, results: Sequence[Mapping[str, Any]]) -> None:
    """Print, where there are several hosts, what moecomm chose and why, as rank 0 says at the end."""
    texts = {about["name"]: about["explanation"] for about in results[0]["backends"]}
    if config.topology.num_hosts > 1 and texts.get("moecomm"):
        console.heading("What moecomm chose")
        console.line(texts["moecomm"])


def print_table(console: Console, records: Sequence[Record]) -> None:
    """Print the table, the receive memory, and, if anything is wrong, which lines are."""
    console.line()
    if records and records[0].idle is not None:
        console.table(*low_latency_table(records))
        _print_noise(console, records)
    else:
        console.table(*table(records))
    if any(record.hops is not None for record in records):
        console.table(*hops_table(records), title="Between hosts, of the host that has most")
    # Memory of fixed shape is reserved, not counted: nothing to be said of it.
    known = (r for r in records if r.op == "dispatch" and r.memory is not None and r.idle is None)
    largest = max(known, key=_tokens, default=None)
    if largest is not None and largest.memory is not None:
        console.line(
            f"receive memory of {largest.backend}: {format_bytes(largest.memory)} touched per rank at most, for rows "
            f"received and rows to combine, alive at once: 2 x {format_bytes(largest.bytes)}"
        )
    for record in records:
        if record.wrong:
            console.error(f"{record.op} of {record.backend} at {record.tokens} tokens: {record.wrong} wrong element(s)")
    if all(record.wrong == 0 for record in records):
        console.line("all answers are right", style="green")
