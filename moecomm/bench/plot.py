"""The benchmark's picture: one panel per operation, bars for one case, lines over the number of tokens for several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moecomm.bench.config import BenchConfig
from moecomm.bench.measure import OPS
from moecomm.bench.records import Record
from moecomm.bench.report import format_us
from moecomm.errors import TransportUnavailable

__all__ = ["plot"]

# Colours that people with any colour vision can tell apart (Okabe and Ito).
COLOURS = {"moecomm": "#0072B2", "gloo": "#E69F00", "mpi": "#009E73"}
OTHER_COLOURS = ("#CC79A7", "#D55E00", "#56B4E9")
BOUND_COLOUR = "#555555"
TITLES = {"dispatch": "Dispatch", "combine": "Combine (weighted)", "pair": "Dispatch + combine"}


def plot(config: BenchConfig, records: Sequence[Record], path: Path) -> None:
    """Write a PNG (or what the ending of `path` says) of the records.

    Raises:
        TransportUnavailable: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise TransportUnavailable("the plot", "matplotlib is not installed.", "pip install 'moecomm[cli]'.") from None
    backends = list(dict.fromkeys(record.backend for record in records))
    others = [name for name in backends if name not in COLOURS]
    colours = COLOURS | {name: OTHER_COLOURS[i % len(OTHER_COLOURS)] for i, name in enumerate(others)}
    many = len(config.tokens) > 1
    figure = Figure(figsize=(12, 4.2 if many else 1.9 + 0.55 * (len(backends) + 1)), layout="constrained")
    # One scale for all panels, so that they can be compared.
    axes = figure.subplots(1, len(OPS), sharex=True, sharey=many)
    for axis, op in zip(axes, OPS, strict=True):
        chosen = [record for record in records if record.op == op]
        axis.set_title(TITLES[op], loc="left", fontweight="bold")
        if many:
            _lines(axis, chosen, backends, colours)
        else:
            _bars(axis, chosen, colours)
        axis.spines[["top", "right"]].set_visible(False)
    if not many:
        times = [r.summary.median_us for r in records] + [r.bound_us for r in records if r.bound_us is not None]
        low, high = min(times) / 2, max(times)
        # Room for the figures behind the bars.
        axes[0].set_xlim(low, high * (high / low) ** 0.5)
    else:
        axes[0].set_ylabel("time of the slowest rank, median")
        axes[0].legend(frameon=False, fontsize=9)
    tokens = "" if many else f" x {config.tokens[0]} tokens"
    figure.suptitle(
        f"moecomm bench: {config.ranks} ranks{tokens} x {config.hidden} {config.dtype}, "
        f"top-{config.topk} of {config.experts} experts, {config.routing} routing",
        fontsize=10,
        color="#333333",
        x=0.01,
        horizontalalignment="left",
    )
    figure.savefig(path, dpi=150)


def _bars(axis: Any, records: Sequence[Record], colours: dict[str, str]) -> None:
    labels = [record.backend for record in records]
    times = [record.summary.median_us for record in records]
    texts = [
        format_us(record.summary.median_us)
        + (f"  ({record.ratio:.3g} x)" if record.ratio is not None and record.backend != "moecomm" else "")
        for record in records
    ]
    palette = [colours[record.backend] for record in records]
    bound = records[0].bound_us
    if bound is not None:
        labels.append("memory bound")
        times.append(bound)
        texts.append(format_us(bound))
        palette.append("#BBBBBB")
        axis.axvline(bound, color=BOUND_COLOUR, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    places = range(len(labels))
    axis.barh(places, times, color=palette, height=0.62)
    axis.set_yticks(places, labels)
    axis.invert_yaxis()
    axis.set_xscale("log")
    for place, time, text in zip(places, times, texts, strict=True):
        axis.annotate(text, (time, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    axis.tick_params(axis="y", length=0)
    axis.xaxis.set_major_formatter(lambda value, position: format_us(value))
    axis.set_xlabel("time of the slowest rank, median (log scale)", fontsize=9)


def _lines(axis: Any, records: Sequence[Record], backends: Sequence[str], colours: dict[str, str]) -> None:
    for name in backends:
        mine = sorted((record for record in records if record.backend == name), key=lambda record: record.tokens)
        tokens = [record.tokens for record in mine]
        axis.plot(
            tokens, [r.summary.median_us for r in mine], color=colours[name], marker="o", markersize=4, label=name
        )
        axis.fill_between(
            tokens,
            [record.summary.min_us for record in mine],
            [record.summary.p99_us for record in mine],
            color=colours[name],
            alpha=0.15,
            linewidth=0,
        )
    bounds = sorted((record.tokens, record.bound_us) for record in records if record.bound_us is not None)
    if bounds:
        axis.plot(
            *zip(*bounds, strict=True), color=BOUND_COLOUR, linestyle=(0, (4, 3)), linewidth=1, label="memory bound"
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = sorted({record.tokens for record in records})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.yaxis.set_major_formatter(lambda value, position: format_us(value))
    axis.set_xlabel("tokens per rank (band: min to p99)", fontsize=9)
    axis.grid(axis="y", color="#E5E5E5", linewidth=0.8)
