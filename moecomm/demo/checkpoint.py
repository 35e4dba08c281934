"""The demo's model as a file: the experts of all ranks in one state, to be loaded at any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moecomm.demo.model import LanguageModel, make_communicator
from moecomm.demo.settings import Settings
from moecomm.demo.stopwatch import TimedCommunicator
from moecomm.groups import Group

__all__ = ["load_model", "load_settings", "save_model"]


def save_model(model: LanguageModel, settings: Settings, path: Path, *, group: Group) -> None:
    """Writes the whole model on rank 0. Collective: the other ranks send their experts.

    The file holds `{"settings": dict, "state": {name: tensor}}`, expert tensors by global expert id, and is read with
    `torch.load(weights_only=True)`.
    """
    # Copies, because experts are slices of larger tensors, which would be written whole.
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parts = group.all_gather(state)
    if group.rank == 0:
        whole = {name: tensor for part in reversed(parts) for name, tensor in part.items()}
        torch.save({"settings": settings.as_dict(), "state": whole}, path)


def load_settings(path: Path) -> Settings:
    """The settings of the model in a file."""
    return Settings(**torch.load(path, weights_only=True, mmap=True)["settings"])


def load_model(
    path: Path, *, group: Group, max_tokens_per_rank: int | None = None, **changed: Any
) -> tuple[LanguageModel, TimedCommunicator]:
    """Reads a model written by `save_model`, at any number of ranks. Collective.

    Arguments:
        max_tokens_per_rank: see `make_communicator`.
        changed: settings that shall differ from those in the file.

    Returns:
        The model, whose experts are those of this rank, and the communicator it runs on, for the caller to close.
    """
    saved = torch.load(path, weights_only=True, mmap=True)
    settings = Settings(**(saved["settings"] | changed))
    communicator = make_communicator(group, settings, max_tokens_per_rank=max_tokens_per_rank)
    model = LanguageModel(settings, communicator=communicator, loss_group=group)
    model.load_state_dict(saved["state"])
    return model.eval(), communicator
