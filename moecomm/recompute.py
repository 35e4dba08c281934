"""Activation checkpointing: a recompute must route as the forward did, which shows as soon as it routes."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from moecomm.errors import RoutingChanged
from moecomm.handle import Handle

__all__ = ["RoutingLog", "compared", "is_recomputing"]

_CHANGED = (
    "topk_idx differs, so gradients would be wrong. Keep the router outside the checkpointed part, make it "
    "deterministic (dropout, jitter, a bias updated in between), or keep what was exchanged (moecomm.nn.keep_exchanges)"
)

_LENGTH = 1 << 16


def is_recomputing() -> bool:
    """Whether non-reentrant activation checkpointing repeats a forward right now.

    Reentrant checkpointing cannot be told from a forward of its own, and neither could a torch that names this hook
    otherwise; the check in the backward does not depend on it.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_recomputation_hook.")


class RoutingLog:
    """Fingerprints of the latest dispatches: many more than can wait for their backward at a time."""

    def __init__(self) -> None:
        self._fingerprints = np.zeros(_LENGTH, dtype=np.int64)  # pages are taken as they are used
        self._count = 0

    def add(self, fingerprint: int) -> None:
        """Notes one, and forgets one of long ago."""
        self._fingerprints[self._count % _LENGTH] = fingerprint
        self._count += 1

    def check(self, fingerprint: int) -> None:
        """Raises RoutingChanged if a recompute has routed like none of them."""
        if not (self._fingerprints[: self._count] == fingerprint).any():
            raise RoutingChanged(f"a recompute dispatches otherwise than any forward did: {_CHANGED}")


def compared(handle: Handle, recomputed: torch.Tensor) -> Handle:
    """The handle of a forward for its backward, given the token of the recompute.

    Where the device alone knows the routing, the host does not wait for it: all ranks find out, in the calls with this
    handle, whether it has changed.

    Raises:
        RoutingChanged: it has.
    """
    forward = handle.token
    if not handle.is_on_device:
        (first, expected, *_), (second, found, *_) = forward.tolist(), recomputed.tolist()
        if expected == found:
            return handle
        raise RoutingChanged(f"dispatch #{second} repeats dispatch #{first} for the backward, but {_CHANGED}")
    if forward.shape != recomputed.shape:
        raise RoutingChanged(
            f"a recompute of dispatch #{handle.origin} has topk_idx of shape {list(recomputed.shape)}, the forward had "
            f"{list(forward.shape)}: {_CHANGED}"
        )
    changed = torch.ne(forward, recomputed).any().to(torch.int64)
    return dataclasses.replace(handle, routing=handle.routing._replace(changed=changed))
