"""Receive memory of one rank: an arena that peers write to and read from, and the tensors that live in it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moecomm import _C
from moecomm.devices.base import Device
from moecomm.devices.queue import Queue
from moecomm.errors import MemoryLimitExceeded
from moecomm.transports.base import Transport

__all__ = ["ReceiveMemory"]

# Address space costs nothing. Twice the limit absorbs fragmentation; with more, tensors of similar size take each
# other's place (csrc/memory/arena.h). All ranks' parts together get at most a 16th of the 2**47 bytes of a process.
_LEAST_SPACE, _MOST_SPACE = 2, 4
_MAPPABLE_BYTES = 2**43
_PAGE = 4096


def _nothing() -> None:
    """There is nothing to let go of."""


class ReceiveMemory:
    """The arena of a communicator on one rank. Construction is collective.

    Address space is reserved once, memory by touching pages; a block returns when the last tensor on it dies. On a
    device all memory is there from the start, as much as the largest limit.

    Arguments:
        transport: makes the region.
        device: whose memory it is.
        queue: its work.
        memory_limit: bytes that may be alive at once on this rank.
        largest_limit: the largest limit of any rank; regions are symmetric.
        fixed_bytes: address space for blocks of fixed shape, which are mostly empty: half of it for what dispatches
            bring, half for what combines send.

    Attributes:
        limit: memory_limit.
        is_shared: blocks of fixed shape lie among the others, and may hold anything.
        region: all of it, at every rank.
        allocate: gives a block of at least so many bytes, or None if the limit does not allow it.
        allocate_arriving: the same for a block of fixed shape for what a dispatch brings; only pages that rows touch
            take memory. None: no space.
        allocate_leaving: the same for what a combine sends. Apart, since the others' memory is known to be zero but for
            some rows.
        reclaim: lets go of blocks that are kept for later; called when there is no space.
        num_copies: tensors that had to be copied to where peers can read them.
    """

    def __init__(
        self,
        transport: Transport,
        device: Device,
        queue: Queue,
        memory_limit: int,
        largest_limit: int,
        fixed_bytes: int,
    ) -> None:
        self.limit = memory_limit
        self._queue = queue
        wanted = largest_limit
        if device.is_host:
            wanted = min(_MOST_SPACE * largest_limit, _MAPPABLE_BYTES // transport.num_ranks)
            wanted = max(wanted, _LEAST_SPACE * largest_limit)
        arena_bytes = -(-wanted // _PAGE) * _PAGE
        self.region = transport.allocate_on(device, arena_bytes + fixed_bytes)
        self._mapping = transport.mapping(self.region)
        self._arena = _C.Arena(self._mapping, memory_limit, 0, arena_bytes)
        self.is_shared = not device.is_host
        self.fixed_limit = memory_limit
        self._arriving = self._leaving = self._arena
        if not self.is_shared:
            self.fixed_limit = fixed_bytes // 2 // _PAGE * _PAGE
            self._arriving = _C.Arena(self._mapping, self.fixed_limit, arena_bytes, self.fixed_limit)
            self._leaving = _C.Arena(self._mapping, self.fixed_limit, arena_bytes + self.fixed_limit, self.fixed_limit)
        self.allocate = self._taking(self._arena)
        self.allocate_arriving = self._taking(self._arriving)
        self.allocate_leaving = self._taking(self._leaving)
        self.reclaim: Callable[[], object] = _nothing
        self.num_copies = 0
        self._final: _C.ArenaUsage | None = None
        self._start = self.region.address
        self._end = self._start + self.region.nbytes

    def _taking(self, arena: _C.Arena) -> Callable[[int], _C.Block | None]:
        """What takes blocks of an arena; on a device, for what is done after the tensors that were there before."""
        if not self.is_shared:
            return arena.allocate

        def take(nbytes: int) -> _C.Block | None:
            block = arena.allocate(nbytes)
            if block is None:
                self.reclaim()
                block = arena.allocate(nbytes)
            if block is not None:
                self._queue.claim(block)
            return block

        return take

    def clear(self, block: _C.Block) -> None:
        """Makes a block read as zero, where that is possible without touching its pages."""
        if self.is_shared:
            self._queue.set_bytes(block.address, block.nbytes, 0)
            return
        nbytes = -(-block.nbytes // _PAGE) * _PAGE
        self._mapping.clear(block.offset, nbytes)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where a contiguous tensor lies in the arena, or None if it lies elsewhere."""
        address = tensor.data_ptr()
        return address - self._start if self._start <= address < self._end else None

    def share(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[int, ...], list[_C.Block], int]:
        """Brings contiguous tensors where peers can read them; those that are there already stay.

        Returns:
            The tensors' offsets in the arena, the blocks that copies lie in, and 0; or, if there is no memory, no
            offsets, no blocks, and the bytes that were needed.
        """
        offsets: list[int] = []
        blocks: list[_C.Block] = []
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.element_size()
            offset = self.offset_of(tensor) if nbytes else 0
            if offset is None:
                block = self.allocate(nbytes)
                if block is None:
                    return (), [], nbytes
                self._queue.copy(block.address, tensor.data_ptr(), nbytes)
                self.num_copies += 1
                blocks.append(block)
                offset = block.offset
            offsets.append(offset)
        return tuple(offsets), blocks, 0

    def keep_nothing(self) -> None:
        """Gives back what is kept for later, for good."""
        self.reclaim()
        self.reclaim = _nothing

    def exceeded(self, operation: str, who: str, need: int, limit: int) -> MemoryLimitExceeded:
        """The error that every rank raises when one rank's memory does not suffice."""
        return MemoryLimitExceeded(
            f"{operation}: {who} needs {need} bytes of receive memory, which does not fit into its memory_limit of "
            f"{limit} bytes beside what is alive there; nothing was received. Use smaller batches or a smaller "
            "capacity, free earlier results, or construct the Communicator with a larger memory_limit"
        )

    def exceeded_fixed(self, operation: str, who: str, need: int, limit: int) -> MemoryLimitExceeded:
        """The same for memory of fixed shapes."""
        return MemoryLimitExceeded(
            f"{operation}: {who} needs a block of {need} bytes of address space, which does not fit into the {limit} "
            "bytes for low-latency calls beside what is alive there; nothing was received. Let earlier results die, or "
            "construct the Communicator with a smaller max_tokens_per_rank"
        )

    def fixed_blocks(self) -> int:
        """Blocks of fixed shape that are alive; 0 where they are counted among the others."""
        return 0 if self.is_shared else self._arriving.usage().live_blocks + self._leaving.usage().live_blocks

    def usage(self) -> _C.ArenaUsage:
        """Bytes alive, their peak, and those of the pages that were touched."""
        return self._final or self._arena.usage()

    def trim(self) -> int:
        """Gives the pages outside live blocks back to the system; returns the bytes."""
        return self._arena.trim() + self._arriving.trim() + self._leaving.trim()

    def close(self) -> None:
        """Lets go of the region if nothing lies in it; else it lives on until all that does and this have died."""
        usage = self._arena.usage()
        if usage.live_blocks or self.fixed_blocks() or self._final is not None:
            return
        self._final = usage
        self._mapping = _C.Mapping.create_private(_PAGE)
        self._arena = self._arriving = self._leaving = _C.Arena(self._mapping, 0, 0, _PAGE)
        self.allocate = self.allocate_arriving = self.allocate_leaving = self._arena.allocate
