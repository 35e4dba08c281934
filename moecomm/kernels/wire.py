"""How one rank reaches the others, as kernels that send over a network need to know it; made by a transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["DeviceLibrary", "Wire"]


@dataclass(frozen=True)
class DeviceLibrary:
    """The code that kernels are linked with, which carries out what they ask of a network.

    Arguments:
        bitcode: for the architecture of the GPU.
        initialise: called with the handle (CUmodule) of each module before a kernel in it is launched.
    """

    bitcode: Path
    initialise: Callable[[int], None]


@dataclass(frozen=True)
class Wire:
    """How one rank reaches the others, as kernels need it.

    Attributes:
        rank: mine.
        boards: `[R]` int64 on the device: address of each rank's board here, 0 = the rank is far. Mine has one.
        pes: `[R]` int32 on the device: PE of each rank in NVSHMEM.
        board: address of my board, in the symmetric heap like those of the others.
        num_slots: of a board.
        library: what kernels are linked with; None where Triton interprets.

    Raises:
        ValueError: a table is not as said.
    """

    rank: int
    boards: Tensor
    pes: Tensor
    board: int
    num_slots: int
    library: DeviceLibrary | None = None

    def __post_init__(self) -> None:
        for name, table, dtype in (("boards", self.boards, torch.int64), ("pes", self.pes, torch.int32)):
            if table.dtype is not dtype or table.dim() != 1 or not table.is_contiguous():
                raise ValueError(f"{name} is {table.dtype} {list(table.shape)}; wanted contiguous {dtype} [R]")
        if self.pes.shape != self.boards.shape or self.pes.device != self.boards.device:
            raise ValueError(
                f"pes is {list(self.pes.shape)} on {self.pes.device}, boards {list(self.boards.shape)} on "
                f"{self.boards.device}; they must be alike"
            )
        if not 0 <= self.rank < self.boards.numel():
            raise ValueError(f"rank is {self.rank}, but boards has {self.boards.numel()} addresses")

    @property
    def num_ranks(self) -> int:
        return self.boards.numel()

    def lane(self, slot: int) -> int:
        """The lane of mine of a slot.

        Raises:
            ValueError: there is no such slot.
        """
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot is {slot}; a board has {self.num_slots}")
        return slot * self.num_ranks + self.rank
