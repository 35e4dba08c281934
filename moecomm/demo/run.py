"""The demo from start to end: train on several ranks, replay on one, draw, generate, measure."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch

from moecomm.bench import quick_table
from moecomm.cli.console import Column, Console
from moecomm.demo.checkpoint import load_model
from moecomm.demo.generation import generate
from moecomm.demo.ranks import replay, train_rank
from moecomm.demo.settings import Settings
from moecomm.demo.text import Text, baselines, load_text
from moecomm.demo.training import Course, evaluate
from moecomm.groups import SoloGroup
from moecomm.testing import launch

__all__ = ["run_demo", "settings_of", "train_with_progress"]

# Sums over ranks are added in another order than in one process: fp32 rounding, which training then amplifies.
REPLAY_TOLERANCE = 1e-5
PROMPT = "The for statement is used to "
POLL_SECONDS = 0.1


def run_demo(args: argparse.Namespace) -> int:
    """Runs the whole demo.

    Arguments:
        args: as `add_arguments` defines them.

    Returns:
        Exit status: 0, or 1 if the replay disagrees, the model has not learned, or a bench answer was wrong.

    Raises:
        RankFailure, DeadlineExceeded: a rank failed, or training took longer than `args.timeout`.
        BenchFailed: the benchmark did.
    """
    begin = time.perf_counter()
    console = Console()
    settings = settings_of(args)
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(_num_threads(settings))
    text = load_text()
    limits = baselines(text)
    _introduce(console, settings, text, limits)
    courses, transport = train_with_progress(console, settings, output, timeout=args.timeout)
    _report_training(console, settings, courses, transport, limits)
    is_right = _replay(console, settings, courses[0])
    is_right &= _use_saved_model(console, settings, text, output / "model.pt", courses[0])
    has_learned = courses[0].held_out[-1][1] < limits["bigram"]
    if not has_learned:
        console.error("the held-out loss did not fall below the bigram model's")
    _draw(console, settings, courses[0], output, limits)
    is_right &= args.no_bench or _bench(console, settings, seconds=1.0 if args.short else 5.0)
    console.line()
    console.line(f"done in {time.perf_counter() - begin:.0f} s; files in {output}/", style="bold")
    return 0 if is_right and has_learned else 1


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings that the command line asks for."""
    settings = Settings(ranks=args.ranks, transport=args.transport, seed=args.seed)
    if args.short:
        settings = dataclasses.replace(settings, steps=90, layers=2, warmup=20, replay_steps=4, evaluations=3)
    return settings if args.steps is None else dataclasses.replace(settings, steps=args.steps)


def _num_threads(settings: Settings) -> int:
    """Threads of each rank and of this process; the model is small, more would only wait for each other."""
    return max(1, min(4, (os.cpu_count() or 1) // settings.ranks))


def _introduce(console: Console, settings: Settings, text: Text, limits: dict[str, float]) -> None:
    console.heading("moecomm demo: a Mixture-of-Experts language model, its experts spread over processes")
    console.pairs(
        [
            ("text", f"the documentation in pydoc_data.topics, {text.train.numel():,} bytes to learn from, "
                     f"{text.held_out.numel():,} held out"),
            ("model", f"{settings.layers} layers, hidden {settings.hidden}, {settings.experts} experts per layer, "
                      f"top-{settings.topk}"),
            ("ranks", f"{settings.ranks} processes; each holds its share of the experts and of every batch "
                      f"({settings.batch} windows of {settings.window} bytes)"),
            ("to beat", ", ".join(f"{name} {value:.3f}" for name, value in limits.items()) + " nats per held-out byte"),
        ]
    )  # fmt: skip


def train_with_progress(
    console: Console, settings: Settings, output: Path, *, timeout: float
) -> tuple[list[Course], str]:
    """Runs the ranks in processes while this one shows their progress; the model is then in `output`.

    Returns:
        The course of each rank, and the name of the transport.
    """
    progress = output / "progress.txt"
    progress.unlink(missing_ok=True)
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["results"] = launch(
                train_rank,
                settings.ranks,
                settings,
                str(output),
                _num_threads(settings),
                backend="processes",
                timeout=timeout,
            )
        except Exception as error:  # noqa: BLE001 - raised again in the main thread
            outcome["error"] = error

    console.line()
    thread = threading.Thread(target=work, name="training", daemon=True)
    with console.progress("training", settings.steps) as bar:
        thread.start()
        while thread.is_alive():
            thread.join(POLL_SECONDS)
            if progress.exists():
                done, _, words = progress.read_text().partition(" ")
                bar.update(int(done), f"training, {words}")
    progress.unlink(missing_ok=True)
    if "error" in outcome:
        raise outcome["error"]
    courses = [course for course, _ in outcome["results"]]
    return courses, outcome["results"][0][1]


def _report_training(
    console: Console, settings: Settings, courses: list[Course], transport: str, limits: dict[str, float]
) -> None:
    course = courses[0]
    seconds = [max(times) for times in zip(*(one.seconds for one in courses), strict=True)]
    steady = sorted(seconds)[len(seconds) // 2]
    rows = [[str(step), f"{course.losses[step - 1]:.3f}", f"{loss:.3f}"] for step, loss in course.held_out]
    console.table(
        [Column("step", "right"), Column("training", "right"), Column("held out", "right", "bold")],
        rows,
        title="Loss, nats per byte",
    )
    held_out = course.held_out[-1][1]
    exchange = [sum(one.exchange_seconds) / sum(one.seconds) for one in courses]
    reduction = [sum(one.reduction_seconds) / sum(one.seconds) for one in courses]
    last = course.loads[-1].double()
    console.line()
    console.pairs(
        [
            ("held out", f"{held_out:.3f} nats per byte; "
                         + ", ".join(f"{name} {value:.3f}" for name, value in limits.items())),
            ("speed", f"{settings.batch * settings.window / steady:,.0f} tokens/s "
                      f"(slowest rank's median step: {1e3 * steady:.0f} ms)"),
            ("communication", f"{_percent(max(exchange))} of the time in dispatch and combine over {transport}, "
                              f"{_percent(max(reduction))} in the all-reduce of the other gradients over gloo "
                              "(measured in every step, forward and backward, waiting included; slowest rank)"),
            ("busiest expert", f"{(last.max(dim=1).values / last.mean(dim=1)).mean():.2f} times an even load "
                               "(last step, mean over layers)"),
        ]
    )  # fmt: skip


def _ranks(settings: Settings) -> str:
    return "1 rank" if settings.ranks == 1 else f"{settings.ranks} ranks"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _replay(console: Console, settings: Settings, course: Course) -> bool:
    """One process repeats the first steps; are the losses the same?"""
    console.heading(f"The first {settings.replay_steps} steps again, in one process")
    alone = replay(SoloGroup(), settings).losses
    pairs = list(zip(course.losses, alone, strict=False))
    worst = max(abs(many - one) / one for many, one in pairs)
    agrees = worst <= REPLAY_TOLERANCE
    console.pairs(
        [
            (_ranks(settings), "  ".join(f"{many:.6f}" for many, _ in pairs)),
            ("1 process", "  ".join(f"{one:.6f}" for _, one in pairs)),
        ]
    )
    verdict = f"largest relative difference {worst:.1e}, tolerance {REPLAY_TOLERANCE:.0e}"
    if agrees:
        console.line(f"  the losses agree: {verdict}", style="green")
    else:
        console.error(f"the losses differ: {verdict}")
    return agrees


def _use_saved_model(console: Console, settings: Settings, text: Text, path: Path, course: Course) -> bool:
    """Loads in one process what several ranks have saved, judges it again, and lets it write."""
    console.heading(f"The model saved by {_ranks(settings)}, loaded in one process")
    group = SoloGroup()
    model, communicator = load_model(path, group=group)
    with communicator:
        before, after = course.held_out[-1][1], evaluate(model, text, settings, group=group)
        agrees = abs(before - after) <= REPLAY_TOLERANCE * before
        console.pairs([("held out", f"{after:.6f} nats per byte, {before:.6f} when trained")])
        if not agrees:
            console.error("the loaded model is not the one that was saved")
        sample = generate(model, PROMPT, num_bytes=300, window=settings.window, seed=settings.seed)
    console.line("  a sample:")
    for number, line in enumerate((PROMPT + sample).split("\n")):
        console.line(f"    {line}", style="italic" if number == 0 else "")
    return agrees


def _draw(console: Console, settings: Settings, course: Course, output: Path, limits: dict[str, float]) -> None:
    console.heading("Pictures")
    if importlib.util.find_spec("matplotlib") is None:
        console.warning("no pictures: matplotlib is not installed; pip install 'moecomm[cli]' brings it")
        return
    from moecomm.demo.pictures import draw_experts, draw_loss

    what = f"{settings.experts} experts on {_ranks(settings)}"
    draw_loss(course, output / "loss.png", baselines=limits, title=f"Byte-level language model, {what}")
    draw_experts(course, output / "experts.png", ranks=settings.ranks, title=f"Load of each expert, {what}")
    console.pairs([("loss", str(output / "loss.png")), ("experts", str(output / "experts.png"))])


def _bench(console: Console, settings: Settings, *, seconds: float) -> bool:
    """A short table of the benchmark; False if an answer was wrong."""
    console.heading("Dispatch and combine against gloo (moecomm bench measures in full)")
    records = quick_table(console, ranks=settings.ranks, seconds=seconds)
    return all(not record.wrong for record in records)
