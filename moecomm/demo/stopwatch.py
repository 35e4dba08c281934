"""How long a rank spends in dispatch and combine, forward and backward."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from moecomm.communicator import Communicator
from moecomm.handle import Handle, Received

__all__ = ["TimedCommunicator"]


class TimedCommunicator:
    """A communicator that measures the calls made through it, and their backward passes; all else is as it was.

    Arguments:
        communicator: makes the calls.

    Attributes:
        seconds: spent so far in dispatch and combine, in both directions, waiting for peers included.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.seconds = 0.0
        self._communicator = communicator
        self._begin = 0.0

    def __enter__(self) -> TimedCommunicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._communicator.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def dispatch(self, x: Tensor, *arguments: Any, **options: Any) -> Received:
        """As `Communicator.dispatch`."""
        self._start()
        received = self._communicator.dispatch(x, *arguments, **options)
        self._stop()
        self._watch(received.x)
        return received

    def combine(self, y: Tensor, handle: Handle, topk_weights: Tensor | None = None) -> Tensor:
        """As `Communicator.combine`."""
        self._start()
        out = self._communicator.combine(y, handle, topk_weights)
        self._stop()
        self._watch(out)
        return out

    def _start(self, *gradients: Any) -> None:
        self._begin = time.perf_counter()

    def _stop(self, *gradients: Any) -> None:
        self.seconds += time.perf_counter() - self._begin

    def _watch(self, result: Tensor) -> None:
        """Measures the step of backward that belongs to `result`; nothing else runs on this thread meanwhile."""
        node = result.grad_fn
        if torch.is_grad_enabled() and node is not None:
            node.register_prehook(self._start)
            node.register_hook(self._stop)
