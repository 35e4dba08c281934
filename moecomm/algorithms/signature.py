"""What the ranks of a call must agree on, and a call in words."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch

from moecomm.algorithms.routing import Routing
from moecomm.codecs.base import RowFormat, dtype_name

__all__ = ["Operation", "Signature", "signature_of"]


class Operation(enum.IntEnum):
    """What a call does."""

    DISPATCH = 1
    CACHED_DISPATCH = 2
    COMBINE = 3
    EAGER_DISPATCH = 4
    EAGER_COMBINE = 5

    @property
    def title(self) -> str:
        """The operation's name in messages."""
        return _TITLES[self]


_TITLES = {
    Operation.DISPATCH: "dispatch",
    Operation.CACHED_DISPATCH: "dispatch (cached)",
    Operation.COMBINE: "combine",
    Operation.EAGER_DISPATCH: "low-latency dispatch",
    Operation.EAGER_COMBINE: "low-latency combine",
}
_LAYOUTS = ("expert_major", "flat", "slab")


class Signature(NamedTuple):
    """What the ranks must agree on.

    Attributes:
        layout: `expert_major` or `flat`.
        expert_alignment: of each expert's rows.
        format: codec, dtype and hidden size of the rows, as their format writes them.
        num_topk: K.
        weights: 1 if a weight travels with each row, else 0.
        origin: number of the dispatch that made the handle; -1 = none.
        recording: autograd records the call here. The one thing that need not agree.
    """

    layout: str
    expert_alignment: int
    format: tuple[int, int, int]
    num_topk: int
    weights: int
    origin: int
    recording: bool

    def words(self) -> tuple[int, ...]:
        """The 8 integers that are sent."""
        return (
            _LAYOUTS.index(self.layout),
            self.expert_alignment,
            *self.format,
            self.num_topk,
            self.weights,
            self.origin,
        )

    @staticmethod
    def describe(operation: int, words: tuple[int, ...]) -> str:
        """A call in words, from what was sent."""
        layout, alignment, codec, dtype, hidden, num_topk, weights, origin = words
        title = Operation(operation).title if operation in list(Operation) else f"operation {operation}"
        text = (
            f"{title}(hidden={hidden}, dtype={dtype_name(dtype)}, num_topk={num_topk}, "
            f"layout={_LAYOUTS[layout] if 0 <= layout < len(_LAYOUTS) else layout}, expert_alignment={alignment}"
        )
        if codec:
            text += f", codec={codec}"
        text += f", travelling weights={'yes' if weights else 'no'}"
        if origin >= 0:
            text += f", handle of dispatch #{origin}"
        return text + ")"


def signature_of(routing: Routing, row_format: RowFormat, extra: torch.Tensor | None) -> Signature:
    """What the ranks of a call must agree on.

    Arguments:
        routing: of the call.
        row_format: of its rows.
        extra: weights or values that travel beside the rows, or None.
    """
    return Signature(
        layout=routing.layout,
        expert_alignment=routing.expert_alignment,
        format=row_format.words,
        num_topk=routing.topk_idx.shape[1],
        weights=int(extra is not None),
        origin=_origin(routing),
        recording=routing.recording,
    )


def _origin(routing: Routing) -> int:
    if routing.origin is not None:
        return routing.origin
    return -1 if routing.stamp is None else int(routing.stamp[0])
