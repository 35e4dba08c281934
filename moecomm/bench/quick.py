"""A short run with a short table, for programs that want to show figures in passing."""

from __future__ import annotations

from collections.abc import Sequence

from moecomm.bench.config import BenchConfig
from moecomm.bench.launch import run_ranks
from moecomm.bench.records import Record, make_records
from moecomm.bench.report import format_us
from moecomm.cli.console import Column, Console

__all__ = ["quick_table"]


def quick_table(
    console: Console | None = None,
    *,
    ranks: int = 2,
    tokens: Sequence[int] = (1, 1024),
    hidden: int = 1024,
    experts: int = 32,
    topk: int = 8,
    dtype: str = "bfloat16",
    against: Sequence[str] = ("gloo",),
    seconds: float = 4.0,
    timeout: float = 120.0,
) -> list[Record]:
    """Measure a few sizes against competitors in new processes, checked, and print one line per operation and backend.

    Arguments:
        console: where to print; `None` = a new one on standard output.
        ranks, tokens, hidden, experts, topk, dtype, seconds, timeout: as in `BenchConfig`.
        against: competitors.

    Returns:
        All records, as `make_records` gives them.

    Raises:
        BenchFailed: a rank failed.
    """
    console = console or Console()
    config = BenchConfig(
        ranks=ranks,
        tokens=tuple(tokens),
        hidden=hidden,
        experts=experts,
        topk=topk,
        dtype=dtype,
        backends=("moecomm", *against),
        seconds=seconds,
        timeout=timeout,
    )
    with console.progress("bench", 1.0) as bar:
        records = make_records(config, run_ranks(config, progress=bar.update))
    columns = [Column("tokens", "right"), Column("op"), Column("backend"), Column("median", "right", "bold")]
    columns += [Column(name, "right") for name in ("GB/s", "of bound", "x ours", "wrong")]
    console.table(
        columns,
        [
            [
                str(record.tokens),
                record.op,
                record.backend,
                format_us(record.summary.median_us),
                f"{record.gbps:.2f}",
                "-" if record.bound_fraction is None else f"{100 * record.bound_fraction:.3g} %",
                "-" if record.ratio is None else f"{record.ratio:.3g}",
                str(record.wrong),
            ]
            for record in records
        ],
    )
    return records
