"""The demo's two pictures: how the loss fell, and how the load spread over the experts. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moecomm.demo.training import Course
from moecomm.placement import Placement

__all__ = ["draw_experts", "draw_loss"]

_INK = "#1f2933"
_FAINT = "#9aa5b1"
_BLUE = "#2364aa"
_RED = "#d1495b"
_HEAT_COLUMNS = 160


def draw_loss(course: Course, path: Path, *, baselines: dict[str, float], title: str) -> None:
    """Loss per byte over the steps, with the held-out loss and the simple models' as lines."""
    figure, (axes,) = _figure(8.0, 4.5)
    steps = range(1, len(course.losses) + 1)
    axes.plot(steps, course.losses, color=_BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(steps, _smoothed(course.losses), color=_BLUE, linewidth=1.8, label="training")
    if course.held_out:
        done, losses = zip(*course.held_out, strict=True)
        axes.plot(done, losses, "o-", color=_RED, markersize=4, linewidth=1.2, label="held out")
        axes.annotate(
            f"{losses[-1]:.2f}",
            (done[-1], losses[-1]),
            textcoords="offset points",
            xytext=(6, 6),
            color=_RED,
            fontweight="bold",
        )
    for name, value in baselines.items():
        axes.axhline(value, color=_FAINT, linestyle="--", linewidth=1)
        axes.annotate(
            f"{name} {value:.2f}",
            (1.0, value),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            xytext=(-4, 4),
            ha="right",
            color=_FAINT,
        )
    axes.set(xlabel="step", ylabel="nats per byte", xlim=(0, len(course.losses) * 1.03), ylim=(0, None))
    axes.set_title(title, loc="left", color=_INK)
    axes.legend(frameon=False, loc="lower left")
    _save(figure, path)


def draw_experts(course: Course, path: Path, *, ranks: int, title: str) -> None:
    """One strip per layer: each expert's share of the routes over the steps, relative to an even share."""
    from matplotlib.colors import TwoSlopeNorm

    loads = torch.stack(course.loads).double()
    num_steps, num_layers, num_experts = loads.shape
    relative = _pooled(loads / loads.mean(dim=2, keepdim=True).clamp(min=1e-9))
    highest = max(2.0, relative.quantile(0.995).item())
    norm = TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=highest)
    figure, rows = _figure(8.0, 1.2 + 1.35 * num_layers, rows=num_layers)
    image: Any = None
    for layer, axes in enumerate(rows):
        image = axes.imshow(
            relative[:, layer].t().numpy(),
            aspect="auto",
            cmap="RdBu_r",
            norm=norm,
            interpolation="nearest",
            extent=(0.5, num_steps + 0.5, num_experts - 0.5, -0.5),
        )
        axes.set_ylabel(f"layer {layer}", color=_INK)
        bands = [Placement(num_experts, ranks).local_experts(rank) for rank in range(ranks)]
        for band in bands[1:]:
            axes.axhline(band.start - 0.5, color=_INK, linewidth=0.8)
        names = [f"rank {rank}\n{band.start} - {band.stop - 1}" for rank, band in enumerate(bands) if band]
        axes.set_yticks([(band.start + band.stop - 1) / 2 for band in bands if band], names)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False)
        if layer < num_layers - 1:
            axes.tick_params(labelbottom=False)
    rows[0].set_title(title, loc="left", color=_INK)
    rows[-1].set_xlabel("step")
    bar = figure.colorbar(image, ax=rows, fraction=0.025, pad=0.02)
    bar.set_label("load, even = 1")
    _save(figure, path)


def _figure(width: float, height: float, *, rows: int = 1) -> tuple[Any, Any]:
    # A figure without pyplot: no global state, no window, no choice of a backend.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained", facecolor="white")
    all_axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=_INK, labelsize=8)
        axes.grid(alpha=0.2)
    return figure, all_axes


def _save(figure: Any, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    figure.savefig(path)


def _smoothed(values: list[float]) -> list[float]:
    """Exponential mean, corrected for its start."""
    smooth, weight, out = 0.0, 0.0, []
    for value in values:
        smooth, weight = 0.8 * smooth + 0.2 * value, 0.8 * weight + 0.2
        out.append(smooth / weight)
    return out


def _pooled(values: Tensor) -> Tensor:
    """`[steps, ...]` with at most so many steps as a picture has columns to show."""
    num = min(values.shape[0], _HEAT_COLUMNS)
    return torch.stack([part.mean(dim=0) for part in values.tensor_split(num)])
