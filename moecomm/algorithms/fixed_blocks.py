"""Blocks of fixed shape that are zero except where rows are: which rows those are is remembered from use to use.

A slab for every token that could arrive is mostly empty. Zeroing it for each call would cost more than the call, so a
block that comes back keeps a note of the rows that hold something, and only those are zeroed. The note is thrown away,
and the whole block cleared, if anyone has written to the tensor in between.
"""

from __future__ import annotations

import dataclasses

import torch

from moecomm import _C
from moecomm.algorithms.receive_memory import ReceiveMemory

__all__ = ["FixedBlock", "FixedBlocks"]


@dataclasses.dataclass(eq=False)
class _Note:
    """What is known of the memory of one block.

    Attributes:
        nbytes: its size.
        form: what the rows in it looked like.
        used: see `moecomm.kernels.eager.Block`.
        watches: tensors without memory that share the version counters of those given out.
        versions: the counters' values then.
    """

    nbytes: int
    form: tuple[int, ...]
    used: torch.Tensor
    watches: tuple[torch.Tensor, ...] = ()
    versions: tuple[int, ...] = (-1,)


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

    def watch(self, *tensors: torch.Tensor) -> None:
        """Names the tensors given out, once the block is filled; torch counts the writes to them."""
        watches = []
        for tensor in tensors:
            watch = tensor.detach()
            # Keeps the version counter and lets go of the memory, whose death must return the block.
            watch.data = _NOTHING
            watches.append(watch)
        self._note.watches = tuple(watches)
        self._note.versions = tuple(watch._version for watch in watches)


_NOTHING = torch.empty(0)


class FixedBlocks:
    """The blocks of fixed shape of one communicator.

    Arguments:
        memory: where they lie.
    """

    def __init__(self, memory: ReceiveMemory) -> None:
        self._memory = memory
        self._notes: dict[int, _Note] = {}

    def take(self, nbytes: int) -> _C.Block | None:
        """A block with whatever is in it, to be filled by others; None if there is no space."""
        block = self._memory.allocate_fixed(nbytes)
        if block is not None:
            self._forget(block.offset, block.offset + nbytes)
        return block

    def _forget(self, begin: int, end: int) -> None:
        for start in [start for start, note in self._notes.items() if start < end and begin < start + note.nbytes]:
            del self._notes[start]

    def lease(self, nbytes: int, form: tuple[int, ...], num_used: int) -> FixedBlock | None:
        """A block that is zero but for the rows that `used` names; None if there is no space.

        Arguments:
            nbytes: its size.
            form: bytes per row and the like: what `used` counts means the same only for the same form.
            num_used: entries of `used`.
        """
        block = self._memory.allocate_fixed(nbytes)
        if block is None:
            return None
        note = self._notes.get(block.offset)
        if note is None or not _is_intact(note, nbytes, form):
            self._memory.clear(block)
            self._forget(block.offset, block.offset + nbytes)
            note = _Note(nbytes, form, torch.zeros(num_used, dtype=torch.int64))
            self._notes[block.offset] = note
        # Until the tensors are named, the block counts as written to by others.
        note.versions = (-1,)
        return FixedBlock(block, note)


def _is_intact(note: _Note, nbytes: int, form: tuple[int, ...]) -> bool:
    if note.nbytes != nbytes or note.form != form or len(note.versions) != len(note.watches):
        return False
    return all(watch._version == version for watch, version in zip(note.watches, note.versions, strict=True))
