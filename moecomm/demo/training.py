"""Training the demo's model: the same code on any number of ranks, so that one process can replay what two did."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moecomm.demo.model import LanguageModel
from moecomm.demo.settings import Settings
from moecomm.demo.stopwatch import TimedCommunicator
from moecomm.demo.text import Text, sample_windows, window_grid
from moecomm.groups import Group
from moecomm.nn import clip_grad_norm, synchronize_gradients, take_aux_loss
from moecomm.nn.reductions import sum_over_group

__all__ = ["Course", "evaluate", "share_of", "train"]

_EVALUATION_BATCH = 16


@dataclass
class Course:
    """What happened in training; every list has one entry per step, the same on every rank but for the times.

    Attributes:
        losses: nats per byte, mean over the batch of all ranks.
        balance_losses: the routers' losses, mean over the ranks.
        gradient_norms: before clipping.
        seconds: wall time of the step on this rank.
        reduction_seconds: of these, in the all-reduce of gradients, waiting for the other ranks included.
        exchange_seconds: of these, in dispatch and combine, forward and backward, waiting included.
        loads: `[layers, E]` int64: routes of all ranks' tokens to each expert.
        held_out: (steps done, nats per byte of the held-out text).
    """

    losses: list[float] = field(default_factory=list)
    balance_losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    reduction_seconds: list[float] = field(default_factory=list)
    exchange_seconds: list[float] = field(default_factory=list)
    loads: list[Tensor] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)


def train(
    model: LanguageModel,
    text: Text,
    settings: Settings,
    *,
    group: Group,
    communicator: TimedCommunicator,
    num_steps: int,
    on_step: Callable[[int, Course], None] = lambda step, course: None,
) -> Course:
    """Makes `num_steps` steps. Collective over `group`.

    Data parallel: a batch is drawn alike on every rank, each takes its share of the windows, and the objective is the
    mean over all bytes of the batch.

    Arguments:
        communicator: that of the model.
        on_step: called after each step with the number of steps done.
    """
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.98)
    )
    course = Course()
    num_bytes = settings.batch * settings.window
    for step in range(num_steps):
        for options in optimizer.param_groups:
            options["lr"] = _learning_rate(settings, step)
        windows = sample_windows(
            text.train, num_windows=settings.batch, length=settings.window, seed=settings.seed * 1_000_003 + step
        )
        begin = time.perf_counter()
        exchanged_before = communicator.seconds
        loss = model.loss(share_of(windows, group)) * (group.size / num_bytes)
        balance_loss = take_aux_loss(model)
        torch.autograd.backward(loss + balance_loss)
        course.exchange_seconds.append(communicator.seconds - exchanged_before)
        begin_reduction = time.perf_counter()
        synchronize_gradients(model, group)
        course.reduction_seconds.append(time.perf_counter() - begin_reduction)
        norm = clip_grad_norm(model, 1.0, group=group)
        optimizer.step()
        optimizer.zero_grad()
        course.seconds.append(time.perf_counter() - begin)
        means = sum_over_group(torch.stack([loss.detach(), balance_loss.detach()]), group) / group.size
        course.losses.append(means[0].item())
        course.balance_losses.append(means[1].item())
        course.gradient_norms.append(norm.item())
        course.loads.append(sum_over_group(model.expert_loads(), group))
        if (step + 1) % settings.evaluation_period == 0 or step + 1 == settings.steps:
            course.held_out.append((step + 1, evaluate(model, text, settings, group=group)))
        on_step(step + 1, course)
    return course


@torch.no_grad()
def evaluate(model: LanguageModel, text: Text, settings: Settings, *, group: Group) -> float:
    """Held-out loss in nats per byte. Collective over `group`.

    Every rank makes the same number of calls, with batches that may be empty on some.
    """
    windows = window_grid(text.held_out, length=settings.window)
    total = torch.zeros((), dtype=torch.float64)
    for batch in torch.split(windows, _EVALUATION_BATCH * group.size):
        total += model.loss(share_of(batch, group)).double()
    return sum_over_group(total, group).item() / (windows.shape[0] * settings.window)


def share_of(windows: Tensor, group: Group) -> Tensor:
    """This rank's windows: contiguous parts whose sizes differ by one at most, and may be 0."""
    return windows.tensor_split(group.size)[group.rank]


def _learning_rate(settings: Settings, step: int) -> float:
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
