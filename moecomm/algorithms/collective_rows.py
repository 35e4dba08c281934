"""Rows through one all-to-all: packed by destination on the way out, by source on the way in.

A source's rows travel in ascending order of (destination rank, row there); the receiver knows from the counts which
row of its block each of them is. On the way back they travel in the same order.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from moecomm.algorithms.plan import Layout, block_layout, plan_exchange
from moecomm.groups import TorchGroup
from moecomm.kernels.base import ROW_BITS
from moecomm.placement import Placement

__all__ = ["RowExchange", "as_bytes", "join_planes"]


class RowExchange:
    """Which rows one rank sends and receives, for one routing.

    Arguments:
        group: carries the bytes.
        routes: `[T, P]` int64 of this rank.
        counts: `[R, E + R]` int32 of all ranks.
        placement, rank, layout, expert_alignment, capacity: of the exchange.

    Attributes:
        num_rows: N received here, padding included.
        home_routes: `[T, P]` int64: as `routes`, but with the row's place among those that this rank has sent to the
            same rank: where it lies when it comes back.
    """

    def __init__(
        self,
        group: TorchGroup,
        routes: torch.Tensor,
        counts: npt.NDArray[np.int32],
        placement: Placement,
        rank: int,
        layout: Layout,
        expert_alignment: int,
        capacity: int,
    ) -> None:
        self._group = group
        num_ranks = placement.num_ranks
        flat = routes.reshape(-1)
        self._slots = torch.nonzero(flat >= 0).reshape(-1)
        sorted_routes, order = torch.sort(flat[self._slots])
        self._slots = self._slots[order]
        self._num_columns = routes.shape[1]
        destinations = sorted_routes >> ROW_BITS
        self._num_sent: list[int] = torch.bincount(destinations, minlength=num_ranks).tolist()
        first = torch.tensor([0, *self._num_sent[:-1]]).cumsum(0)
        self.home_routes = torch.full_like(flat, -1)
        places = torch.arange(len(self._slots)) - first[destinations]
        self.home_routes[self._slots] = (destinations << ROW_BITS) | places
        self.home_routes = self.home_routes.reshape(routes.shape)
        plan = plan_exchange(counts, placement, rank, layout, expert_alignment, capacity)
        self.num_rows = plan.rows_per_rank[rank]
        self._targets, self._num_received = _targets(counts, placement, rank, layout, expert_alignment, capacity)

    def tokens(self) -> torch.Tensor:
        """`[sent]` int64: token of each row that is sent, in the order of travel."""
        return self._slots // self._num_columns

    def slots(self) -> torch.Tensor:
        """`[sent]` int64: index into the flattened routes of each row that is sent, in the order of travel."""
        return self._slots

    def destinations(self) -> torch.Tensor:
        """`[sent]` int64: rank to which each row goes, in the order of travel."""
        return torch.repeat_interleave(torch.arange(len(self._num_sent)), torch.tensor(self._num_sent))

    def first_home(self) -> list[int]:
        """Per rank, where the rows that come back from it begin."""
        return [sum(self._num_sent[:rank]) for rank in range(len(self._num_sent))]

    def send(self, rows: torch.Tensor, blank: int = 0) -> torch.Tensor:
        """Sends `[sent, B]` uint8 rows; gives `[N, B]` rows in their final places, `blank` where nothing arrived."""
        arrived = self._all_to_all(rows, self._num_sent, self._num_received)
        out = torch.full((self.num_rows, rows.shape[1]), blank, dtype=torch.uint8)
        out[self._targets] = arrived
        return out

    def send_back(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends `[N, B]` uint8 rows back to where they came from; gives `[sent, B]` rows in the order of travel."""
        return self._all_to_all(rows[self._targets], self._num_received, self._num_sent)

    def _all_to_all(self, rows: torch.Tensor, num_out: list[int], num_in: list[int]) -> torch.Tensor:
        row_bytes = rows.shape[1]
        arrived = torch.empty((sum(num_in), row_bytes), dtype=torch.uint8)
        dist.all_to_all_single(
            arrived.reshape(-1),
            rows.contiguous().reshape(-1),
            [n * row_bytes for n in num_in],
            [n * row_bytes for n in num_out],
            group=self._group.process_group,
        )
        return arrived


def _targets(
    counts: npt.NDArray[np.int32],
    placement: Placement,
    rank: int,
    layout: Layout,
    expert_alignment: int,
    capacity: int,
) -> tuple[torch.Tensor, list[int]]:
    """Final places `[received]` int64 of the rows that arrive, by source and order of travel; and how many of each."""
    targets: list[npt.NDArray[np.int64]] = []
    num_received: list[int] = []
    for source in range(placement.num_ranks):
        bases = plan_exchange(counts, placement, source, layout, expert_alignment, capacity).bases
        if layout == "flat":
            each = counts[source, placement.num_experts + rank : placement.num_experts + rank + 1]
            starts = bases[rank : rank + 1]
        else:
            local = placement.local_experts(rank)
            each = counts[source, local.start : local.stop]
            starts = bases[local.start : local.stop]
        pieces = [np.arange(start, start + number) for start, number in zip(starts, each, strict=True)]
        targets.extend(pieces)
        num_received.append(int(each.sum()))
    joined = np.concatenate(targets) if targets else np.empty(0, dtype=np.int64)
    return torch.from_numpy(joined.astype(np.int64)), num_received


def as_bytes(plane: torch.Tensor) -> torch.Tensor:
    """`[N, ...]` rows as `[N, B]` uint8."""
    row_bytes = math.prod(plane.shape[1:]) * plane.element_size()
    if plane.numel() == 0:
        return torch.empty((plane.shape[0], row_bytes), dtype=torch.uint8)
    return plane.contiguous().view(torch.uint8).reshape(-1, row_bytes)


def join_planes(planes: list[torch.Tensor], num_rows: int) -> tuple[bytearray, tuple[int, ...]]:
    """Planes behind each other in one buffer."""
    layout = block_layout(num_rows, tuple(plane.shape[1] for plane in planes))
    buffer = bytearray(layout.nbytes)
    view = np.frombuffer(buffer, dtype=np.uint8)
    for plane, offset in zip(planes, layout.offsets, strict=True):
        view[offset : offset + plane.numel()] = plane.reshape(-1).numpy()
    return buffer, layout.offsets
