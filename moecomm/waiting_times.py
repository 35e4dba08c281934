"""How long a rank has waited for each of the others."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["WaitingTimes"]


class WaitingTimes(NamedTuple):
    """Seconds that one rank's waits have lasted, by the rank waited for.

    Attributes:
        total: `[R]` float32: over all waits.
        longest: `[R]` float32: in one wait.
    """

    total: torch.Tensor
    longest: torch.Tensor
