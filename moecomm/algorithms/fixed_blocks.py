"""Blocks of fixed shape that are zero except where rows are: which rows those are is remembered from use to use.

A slab for every token that could arrive is mostly empty. Zeroing it for each call would cost more than the call, so a
block that comes back keeps a note of the rows that hold something, and only those are zeroed. The note is thrown away,
and the whole block cleared, if torch has written to the tensors in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from moecomm import _C
from moecomm.algorithms.receive_memory import ReceiveMemory

__all__ = ["FixedBlock", "FixedBlocks"]

_Given = tuple[torch.Tensor, torch.Tensor | None]


@dataclasses.dataclass(eq=False)
class _Note:
    """What is known of the memory of one block.

    Attributes:
        nbytes: its size.
        form: what the rows in it looked like.
        used: see `moecomm.kernels.eager.Block`.
        watches: tensors without memory that share the version counters of those given out; None while it is unknown
            who writes to the block.
        versions: the counters' values then.
    """

    nbytes: int
    form: tuple[object, ...]
    used: torch.Tensor
    watches: list[torch.Tensor] | None = None
    versions: list[int] = dataclasses.field(default_factory=list)


class FixedBlock:
    """One block in use, and the note on it.

    Attributes:
        block: the memory; returns when the last tensor on it dies.
        used: rows that hold something, to be kept up to date by whoever fills the block.
    """

    def __init__(self, block: _C.Block, note: _Note) -> None:
        self.block = block
        self.used = note.used
        self._note = note

    def give_out(self, make: Callable[[_C.Block], _Given]) -> _Given:
        """The rows and weights that `make` makes on the block, once it is filled; torch counts the writes to them."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # where writes are not counted
                return self.give_out(make)
        rows, weights = given = make(self.block)
        tensors = [rows] if weights is None else [rows, weights]
        watches = [tensor.detach() for tensor in tensors]
        torch._C._increment_version(tensors)
        versions = [watch._version for watch in watches]
        # Where torch keeps no account, as in some dispatch modes, the counters are not one and the same.
        if versions == [tensor._version for tensor in tensors]:
            for watch in watches:
                # Keeps the version counter and lets go of the memory, whose death must return the block.
                watch.data = _NOTHING
            self._note.watches, self._note.versions = watches, versions
        return given


_NOTHING = torch.empty(0)


class FixedBlocks:
    """The blocks of fixed shape of one communicator, for what its dispatches bring.

    Arguments:
        memory: where they lie.
    """

    def __init__(self, memory: ReceiveMemory) -> None:
        self._memory = memory
        self._notes: dict[int, _Note] = {}

    def lease(self, nbytes: int, form: tuple[object, ...], num_used: int) -> FixedBlock | None:
        """A block that is zero but for the rows that `used` names; None if there is no space.

        Arguments:
            nbytes: its size.
            form: bytes per row and the like: what `used` counts means the same only for the same form.
            num_used: entries of `used`.
        """
        block = self._memory.allocate_arriving(nbytes)
        if block is None:
            return None
        note = self._notes.get(block.offset)
        if note is None or note.nbytes != nbytes or note.form != form or not _is_intact(note):
            self._memory.clear(block)
            self._forget(block.offset, block.offset + nbytes)
            note = self._notes[block.offset] = _Note(nbytes, form, torch.zeros(num_used, dtype=torch.int64))
        note.watches = None
        return FixedBlock(block, note)

    def distrust(self, offset: int) -> None:
        """Says that the block there, which is in use, may be written to without torch counting it."""
        note = self._notes.get(offset)
        if note is not None:
            note.watches = None

    def _forget(self, begin: int, end: int) -> None:
        for start in [start for start, note in self._notes.items() if start < end and begin < start + note.nbytes]:
            del self._notes[start]


def _is_intact(note: _Note) -> bool:
    """Whether the rows that `used` names are all that is not zero."""
    return note.watches is not None and [watch._version for watch in note.watches] == note.versions
