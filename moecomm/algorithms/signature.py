"""What the ranks of a call must agree on, and a call in words."""

from __future__ import annotations

import enum
import zlib
from functools import lru_cache

import torch

from moecomm.algorithms.plan import Layout
from moecomm.algorithms.routing import Routing
from moecomm.codecs.base import RowFormat, dtype_name

__all__ = ["Operation", "Words", "describe", "digest_of", "origin_of", "shape_words", "words_of"]

Words = tuple[int, ...]


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
_BESIDE, _PER_HOST, _WEIGHTED = 1, 2, 4
_LAYOUTS = ("expert_major", "flat", "slab")


@lru_cache(maxsize=256)
def shape_words(
    layout: Layout, expert_alignment: int, capacity: int, row_format: RowFormat, num_topk: int, extra: bool
) -> Words:
    """What ranks must agree on but for the handle, as 8 integers; see `words_of`."""
    return _LAYOUTS.index(layout), expert_alignment, capacity, *row_format.words, num_topk, int(extra)


def words_of(
    routing: Routing,
    row_format: RowFormat,
    extra: torch.Tensor | None,
    *,
    weighted: bool = False,
    per_host: bool = False,
) -> Words:
    """What the ranks of a call must agree on, as the 9 integers that are sent.

    They are: layout; alignment; capacity, or 0; codec, dtype and hidden size of the rows; K; 1 if something travels
    beside each row, plus 2 if a combine sums per host, plus 4 if it weighs rows; number of the dispatch that made the
    handle, or -1.

    Arguments:
        routing: of the call.
        row_format: of its rows.
        extra: weights or values that travel beside the rows, or None.
        weighted: rows of a combine are weighed, where they are summed.
        per_host: each host's rows are summed there.
    """
    num_topk = routing.topk_idx.shape[1]
    form = (routing.layout, routing.expert_alignment, routing.capacity)
    words = shape_words(*form, row_format, num_topk, extra is not None)
    if weighted or per_host:
        words = (*words[:-1], words[-1] + _PER_HOST * per_host + _WEIGHTED * weighted)
    return *words, origin_of(routing)


def digest_of(operation: Operation, words: Words) -> int:
    """A number of 31 bits by which devices know a call of the same operation and words."""
    return zlib.crc32(repr((int(operation), words)).encode()) >> 1


def describe(operation: int, words: Words) -> str:
    """A call in words, from what was sent."""
    layout, alignment, capacity, codec, dtype, hidden, num_topk, how, origin = words
    title = Operation(operation).title if operation in list(Operation) else f"operation {operation}"
    text = (
        f"{title}(hidden={hidden}, dtype={dtype_name(dtype)}, num_topk={num_topk}, "
        f"layout={_LAYOUTS[layout] if 0 <= layout < len(_LAYOUTS) else layout}, expert_alignment={alignment}"
    )
    # A low-latency call has one always, from the communicator's arguments.
    if capacity and operation not in (Operation.EAGER_DISPATCH, Operation.EAGER_COMBINE):
        text += f", capacity={capacity}"
    if codec:
        text += f", codec={codec}"
    text += f", travelling weights={'yes' if how & _BESIDE else 'no'}"
    if how & _WEIGHTED:
        text += ", topk_weights"
    if how & _PER_HOST:
        text += ", reduce=per_host"
    if origin >= 0:
        text += f", handle of dispatch #{origin}"
    return text + ")"


def origin_of(routing: Routing) -> int:
    """Number of the dispatch that made the handle, or -1."""
    if routing.origin is not None:
        return routing.origin
    return -1 if routing.stamp is None else int(routing.stamp[0])
