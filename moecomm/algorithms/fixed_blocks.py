"""Blocks of fixed shape that are zero except where rows are: which rows those are is remembered from use to use.

A slab for every token that could arrive is mostly empty. Zeroing it for each call would cost more than the call, so a
block that comes back keeps a note of the rows that hold something, and only those are zeroed. The note is thrown away,
and the whole block cleared, if torch has written to the tensors in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from moecomm import _C
from moecomm.algorithms.receive_memory import ReceiveMemory

__all__ = ["FixedBlock", "FixedBlocks", "Watch", "watched"]

_NOTHING = torch.empty(0)
_Given = tuple[torch.Tensor, torch.Tensor | None]
_G = TypeVar("_G", bound=tuple[torch.Tensor | None, ...])


class Watch:
    """A tensor without memory that shares the version counter of one that was given out, and the counter's value then.

    Arguments:
        tensor: the one that is given out.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        torch._C._increment_version([tensor])
        self.version = self.tensor._version
        # Where torch keeps no account, as in some dispatch modes, the counters are not one and the same.
        if self.version != tensor._version:
            self.version = -1
        # Keeps the version counter and lets go of the memory, whose death must return the block.
        self.tensor.data = _NOTHING

    def is_intact(self) -> bool:
        """Whether torch has not written to the tensor."""
        return self.tensor._version == self.version


def watched(make: Callable[[], _G]) -> tuple[_G, tuple[Watch, ...]]:
    """The tensors that `make` makes, and what shows whether torch has written to them."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # where writes are not counted
            return watched(make)
    given = make()
    return given, tuple(Watch(tensor) for tensor in given if tensor is not None)


class _Note:
    """What is known of the memory of one block.

    Attributes:
        nbytes: its size.
        content: see `FixedBlocks.lease`.
        used: see `moecomm.kernels.eager.EagerKernels.receive_eager`.
        watches: what shows whether somebody has written to the tensors given out; empty while that is unknown.
    """

    __slots__ = ("content", "nbytes", "used", "watches")

    def __init__(self, nbytes: int, content: tuple[int, ...], num_used: int) -> None:
        self.nbytes = nbytes
        self.content = content
        self.used = torch.zeros(num_used, dtype=torch.int64)
        self.watches: tuple[Watch, ...] = ()

    def is_intact(self) -> bool:
        """Whether the rows that `used` names are all that is not zero."""
        for watch in self.watches:
            if not watch.is_intact():
                return False
        return bool(self.watches)


class FixedBlock:
    """One block in use, and the note on it.

    Attributes:
        block: the memory; returns when the last tensor on it dies.
        used: rows that hold something, to be kept up to date by whoever fills the block.
    """

    def __init__(self, block: _C.Block, note: _Note, is_watched: bool) -> None:
        self.block = block
        self._is_watched = is_watched
        self.used = note.used
        self._note = note

    def give_out(self, make: Callable[[_C.Block], _Given]) -> _Given:
        """The rows and weights that `make` makes on the block, once it is filled; torch counts the writes to them."""
        if not self._is_watched:
            return make(self.block)
        given, self._note.watches = watched(lambda: make(self.block))
        return given


class FixedBlocks:
    """The blocks of fixed shape of one communicator, for what its dispatches bring.

    Arguments:
        memory: where they lie.
        num_local: E_local.
    """

    def __init__(self, memory: ReceiveMemory, num_local: int) -> None:
        self._memory = memory
        self._num_used = max(1, num_local)
        self._notes: dict[int, _Note] = {}

    def lease(self, nbytes: int, content: tuple[int, ...]) -> FixedBlock | None:
        """A block that is zero but for the rows that `used` names; None if there is no space.

        Arguments:
            nbytes: its size.
            content: bytes per row, experts and the like: what `used` counts means the same only for equal content.
        """
        block = self._memory.allocate_arriving(nbytes)
        if block is None:
            return None
        note = self._notes.get(block.offset)
        is_watched = not self._memory.is_shared  # what others have used is cleared each time
        if note is None or not is_watched or note.nbytes != nbytes or note.content != content or not note.is_intact():
            self._memory.clear(block)
            self._forget(block.offset, block.offset + nbytes)
            note = self._notes[block.offset] = _Note(nbytes, content, self._num_used)
        note.watches = ()
        return FixedBlock(block, note, is_watched)

    def distrust(self, offset: int) -> None:
        """Says that the block there, which is in use, may be written to without torch counting it."""
        note = self._notes.get(offset)
        if note is not None:
            note.watches = ()

    def _forget(self, begin: int, end: int) -> None:
        for start in [start for start, note in self._notes.items() if start < end and begin < start + note.nbytes]:
            del self._notes[start]
