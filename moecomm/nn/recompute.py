"""Activation checkpointing that recomputes the experts but exchanges nothing again."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

__all__ = ["keep_exchanges"]

_EXCHANGES = ("moecomm::dispatch", "moecomm::dispatch_cached", "moecomm::combine")


def keep_exchanges() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts for `torch.utils.checkpoint.checkpoint` under which dispatch and combine are not repeated.

        y = checkpoint(layer, x, use_reentrant=False, context_fn=moecomm.nn.keep_exchanges)

    What dispatch and combine gave in the forward (`[N, H]` and `[T, H]` rows, and the routing) is kept until backward;
    all else within the checkpointed part is computed again. Without it the recomputation repeats both exchanges,
    announcement of the counts included, and must find the same routing.
    """
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
    contexts = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return contexts


def _policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    is_kept = operator.name().partition(".")[0] in _EXCHANGES
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
