"""What each rank's process does in the demo."""

from __future__ import annotations

from pathlib import Path

import torch

from moecomm.demo.checkpoint import save_model
from moecomm.demo.model import LanguageModel, make_communicator
from moecomm.demo.settings import Settings
from moecomm.demo.text import load_text
from moecomm.demo.training import Course, train
from moecomm.groups import Group

__all__ = ["replay", "train_rank"]


def train_rank(group: Group, settings: Settings, directory: str, num_threads: int) -> tuple[Course, str]:
    """Trains the model as one rank, saves it as `model.pt`, and returns the course and the transport's name.

    Rank 0 leaves its progress in `progress.txt`: steps done, then a text.
    """
    torch.set_num_threads(num_threads)
    text = load_text()
    progress = Path(directory) / "progress.txt"

    def report(step: int, course: Course) -> None:
        if group.rank == 0:
            recent = course.losses[-20:]
            fresh = progress.with_suffix(".new")
            fresh.write_text(f"{step} loss {sum(recent) / len(recent):.3f}")
            fresh.replace(progress)

    with make_communicator(group, settings) as communicator:
        model = LanguageModel(settings, communicator=communicator, loss_group=group)
        course = train(
            model,
            text,
            settings,
            group=group,
            communicator=communicator,
            num_steps=settings.steps,
            on_step=report,
        )
        save_model(model, settings, Path(directory) / "model.pt", group=group)
        return course, communicator.transport_name


def replay(group: Group, settings: Settings) -> Course:
    """Repeats the first steps of the training; with the same settings they are the same on any number of ranks."""
    with make_communicator(group, settings) as communicator:
        model = LanguageModel(settings, communicator=communicator, loss_group=group)
        num_steps = min(settings.replay_steps, settings.steps)
        return train(model, load_text(), settings, group=group, communicator=communicator, num_steps=num_steps)
