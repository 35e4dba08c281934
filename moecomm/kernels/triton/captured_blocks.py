"""Fixed blocks that captured calls fill: the memory that belongs to one, none of which moves or is made anew.

T num_tokens   Tmax most of them   K num_topk   E num_experts   E_local experts here   R num_ranks   H hidden
G groups of rows, see captured_groups.py   G_local groups here
"""

from __future__ import annotations

import dataclasses
import zlib

import torch
from torch import Tensor

from moecomm.kernels.eager import Form
from moecomm.kernels.triton.captured_groups import Arrived, Scratch
from moecomm.kernels.triton.captured_messages import Found, MessageLayout, Packing, Windows, block_tile, message_layout
from moecomm.kernels.triton.captured_zeros import Block

__all__ = ["CapturedBlock", "Placed", "make_arrived", "make_block", "make_scratch"]


@dataclasses.dataclass
class Placed:
    """Rows in fixed memory, and how they go home.

    Attributes:
        form: of the calls that bring them.
        block: where they are.
        arrived: what is known of them: counts, `num_tokens_per_expert`, `offsets`.
        routes: `[Tmax, K]` int64 of my tokens; the first T rows are the last dispatch's.
        combined: one int64: ticket of the last combine.
        num_tokens: T of the dispatch that was begun last.
        packing: where messages are packed; None: they are not.
    """

    form: Form
    block: Block
    arrived: Arrived
    routes: Tensor
    combined: Tensor
    num_tokens: int = 0
    packing: Packing | None = None

    def distrust(self) -> None:
        """From now on any row may hold something: the next dispatch blanks all that it does not fill."""
        self.arrived.used.fill_(self.form.capacity or self.form.num_rows)


@dataclasses.dataclass
class CapturedBlock:
    """Everything that belongs to the rows of one low-latency dispatch, until the next into the same block.

    Attributes:
        placed: the rows.
        windows, layout, signature: of messages.
        found, scratch: what the receiver keeps while it counts and plans.
        routes: `[R, Tmax, K]` int64 of all ranks' tokens.
        dispatched: one int64: ticket of the last dispatch.
    """

    placed: Placed
    windows: Windows
    layout: MessageLayout
    signature: int
    found: Found
    scratch: Scratch
    routes: Tensor
    dispatched: Tensor


def make_arrived(num_ranks: int, num_experts: int, num_groups: int, tokens_per_expert: Tensor) -> Arrived:
    """Zeros: nothing has arrived and nothing was used. `num_groups`: G_local; `tokens_per_expert`: added to."""
    device = tokens_per_expert.device

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Arrived(
        counts=zeros(num_ranks, num_experts + num_ranks, dtype=torch.int32),
        num_tokens_per_expert=zeros(tokens_per_expert.numel(), dtype=torch.int32),
        offsets=zeros(num_groups, dtype=torch.int32),
        tokens_per_expert=tokens_per_expert,
        first_rows=zeros(num_groups),
        used=zeros(max(1, num_groups)),
        spans=zeros(2, num_groups + 1),
    )


def make_scratch(num_ranks: int, num_experts: int, num_groups: int, device: torch.device) -> Scratch:
    """Memory for planning; `num_groups` is G."""
    return Scratch(
        totals=torch.zeros(num_experts + num_ranks, dtype=torch.int32, device=device),
        starts=torch.zeros(num_groups, dtype=torch.int64, device=device),
        ends=torch.zeros(num_groups, dtype=torch.int64, device=device),
        arrivals=torch.zeros(1, dtype=torch.int32, device=device),
    )


def make_block(
    rank: int,
    form: Form,
    rows: int,
    values: int,
    windows: tuple[int, int],
    sizes: tuple[int, int, int, int],
    tokens_per_expert: Tensor,
    *,
    is_packed: bool = False,
) -> CapturedBlock:
    """A block of rows that are all zero.

    Arguments:
        rank: mine.
        form: of messages and rows.
        rows: address of `[E_local, capacity, H]` or `[num_rows, H]`.
        values: address of the weights, in the same order; 0 without.
        windows: address of my windows, bytes of a message there.
        sizes: Tmax, R, E, E_local.
        tokens_per_expert: `[E_local]` int64, added to.
        is_packed: so are messages.

    Raises:
        ValueError: messages of this form are larger than the windows' messages.
    """
    max_tokens, num_ranks, num_experts, num_local = sizes
    device = tokens_per_expert.device
    layout = message_layout(max_tokens, form.num_topk, form.row_bytes, form.value_bytes)
    address, message_bytes = windows
    if layout.nbytes > message_bytes:
        raise ValueError(f"form needs messages of {layout.nbytes} bytes; message_bytes is {message_bytes}")
    tile = block_tile(max_tokens, form.num_topk)
    blocks = num_ranks * tile.num_blocks
    arrived = make_arrived(num_ranks, num_experts, num_local, tokens_per_expert)
    routes = torch.full((num_ranks, max_tokens, form.num_topk), -1, dtype=torch.int64, device=device)
    num_rows = form.capacity * num_local if form.capacity else form.num_rows
    block = Block(rows, values, form.row_bytes, form.value_bytes if values else 0, num_rows)
    combined = torch.zeros(1, dtype=torch.int64, device=device)
    packing = _make_packing(sizes, form.num_topk, device) if is_packed else None
    return CapturedBlock(
        placed=Placed(form, block, arrived, routes[rank], combined, packing=packing),
        windows=Windows(address, message_bytes, max_tokens, form.num_topk),
        layout=layout,
        signature=_signature_of(form, max_tokens),
        found=Found(
            tokens=torch.zeros(num_ranks, dtype=torch.int64, device=device),
            counts=torch.zeros(blocks, num_experts + num_ranks, dtype=torch.int32, device=device),
            bad=torch.zeros(blocks, 2, dtype=torch.int32, device=device),
        ),
        scratch=make_scratch(num_ranks, num_experts, num_experts, device),
        routes=routes,
        dispatched=torch.zeros(1, dtype=torch.int64, device=device),
    )


def _make_packing(sizes: tuple[int, int, int, int], num_topk: int, device: torch.device) -> Packing:
    max_tokens, num_ranks, _, num_local = sizes
    return Packing(
        bases=torch.zeros(num_ranks, dtype=torch.int64, device=device),
        planned=torch.full((max_tokens, num_topk), -1, dtype=torch.int64, device=device),
        totals=torch.zeros(num_ranks, dtype=torch.int32, device=device),
        slots=torch.zeros(num_ranks, max_tokens, dtype=torch.int32, device=device),
        homeward=torch.full((max_tokens, num_topk), -1, dtype=torch.int64, device=device),
        runs=torch.zeros(num_ranks, max(1, num_local), 3, dtype=torch.int64, device=device),
    )


def _signature_of(form: Form, max_tokens: int) -> int:
    """A number by which messages of other forms are known, 31 bits."""
    return zlib.crc32(repr((tuple(form), max_tokens)).encode()) >> 1
