"""The all-to-all dispatcher over `torch.distributed` with gloo: what frameworks run on CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from moecomm.bench.all_to_all import AllToAllDispatcher
from moecomm.bench.dispatchers import Setup

__all__ = ["GlooDispatcher"]


@final
class GlooDispatcher(AllToAllDispatcher):
    """Exchanges by `torch.distributed.all_to_all_single`."""

    name = "gloo"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._group = setup.process_group

    @property
    def transport(self) -> str:
        return "gloo"

    def exchange(
        self, output: Tensor, source: Tensor, output_splits: Sequence[int], source_splits: Sequence[int]
    ) -> None:
        torch.distributed.all_to_all_single(output, source, list(output_splits), list(source_splits), group=self._group)
