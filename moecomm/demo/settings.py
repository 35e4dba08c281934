"""The sizes of the demo: one object that is the same for every rank, every replay and every later use of the model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """One demo run.

    Arguments:
        ranks: processes over which experts and batch are spread.
        steps: optimizer steps.
        replay_steps: first steps that are repeated in one process.
        batch: windows of text per step, over all ranks.
        window: bytes that a window predicts.
        layers, hidden, heads: of the transformer.
        experts, topk, intermediate: of each layer's experts.
        learning_rate: highest, after `warmup` steps; then it falls along a cosine to a tenth.
        balance_coefficient, z_coefficient: of the router's losses.
        evaluations: how often the held-out loss is taken during training.
        transport: of the communicator.
        seed: of weights and batches.
    """

    ranks: int = 2
    steps: int = 320
    replay_steps: int = 10
    batch: int = 32
    window: int = 128
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    experts: int = 16
    topk: int = 2
    intermediate: int = 128
    learning_rate: float = 4e-3
    warmup: int = 40
    balance_coefficient: float = 0.01
    z_coefficient: float = 1e-4
    evaluations: int = 8
    transport: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("ranks", "steps", "batch", "window"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return dataclasses.asdict(self)

    @property
    def evaluation_period(self) -> int:
        """Steps between two looks at the held-out text."""
        return max(1, self.steps // self.evaluations)
