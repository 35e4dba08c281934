"""Fixed blocks that captured calls fill: the memory that belongs to one, none of which moves or is made anew.

T num_tokens   Tmax most of them   K num_topk   E num_experts   E_local experts here   R num_ranks   H hidden
"""

from __future__ import annotations

import dataclasses
import zlib

import torch
from torch import Tensor

from moecomm.kernels.eager import Form
from moecomm.kernels.triton.captured_messages import Found, MessageLayout, Windows, block_tile, message_layout
from moecomm.kernels.triton.captured_plan import Arrived, Scratch
from moecomm.kernels.triton.captured_zeros import Block

__all__ = ["CapturedBlock", "make_arrived", "make_block", "make_scratch"]


@dataclasses.dataclass
class CapturedBlock:
    """The rows of one dispatch, and its routing, until the next dispatch into the same block.

    Attributes:
        form: of messages and rows.
        block: where the rows are.
        windows, layout, signature: of messages.
        found, scratch: what the receiver keeps while it counts and plans.
        arrived: what it learns: counts, `num_tokens_per_expert`, `offsets`.
        routes: `[R, Tmax, K]` int64 of all ranks' tokens.
        dispatched, combined: one int64 each: tickets of the calls that used the block last.
        num_tokens: T of the dispatch that was begun last.
        is_sent, is_summing: a dispatch, a combine has begun and not been completed.
    """

    form: Form
    block: Block
    windows: Windows
    layout: MessageLayout
    signature: int
    found: Found
    scratch: Scratch
    arrived: Arrived
    routes: Tensor
    dispatched: Tensor
    combined: Tensor
    num_tokens: int = 0
    is_sent: bool = False
    is_summing: bool = False


def make_arrived(num_ranks: int, num_experts: int, num_local: int, device: torch.device) -> Arrived:
    """Zeros: nothing has arrived and nothing was used."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Arrived(
        counts=zeros(num_ranks, num_experts + num_ranks, dtype=torch.int32),
        num_tokens_per_expert=zeros(num_local, dtype=torch.int32),
        offsets=zeros(num_local, dtype=torch.int32),
        tokens_per_expert=zeros(num_local),
        first_rows=zeros(num_local),
        used=zeros(max(1, num_local)),
        spans=zeros(2, num_local + 1),
    )


def make_scratch(num_ranks: int, num_experts: int, device: torch.device) -> Scratch:
    """Memory for planning."""
    return Scratch(
        totals=torch.zeros(num_experts + num_ranks, dtype=torch.int32, device=device),
        starts=torch.zeros(num_experts, dtype=torch.int64, device=device),
        ends=torch.zeros(num_experts, dtype=torch.int64, device=device),
        arrivals=torch.zeros(1, dtype=torch.int32, device=device),
    )


def make_block(
    form: Form,
    rows: int,
    values: int,
    windows: tuple[int, int],
    sizes: tuple[int, int, int, int],
    tokens_per_expert: Tensor,
) -> CapturedBlock:
    """A block of rows that are all zero.

    Arguments:
        form: of messages and rows.
        rows: address of `[E_local, capacity, H]` or `[num_rows, H]`.
        values: address of the weights, in the same order; 0 without.
        windows: address of my windows, bytes of a message there.
        sizes: Tmax, R, E, E_local.
        tokens_per_expert: `[E_local]` int64, added to.

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
    return CapturedBlock(
        form=form,
        block=Block(rows, values, form.row_bytes, form.value_bytes if values else 0),
        windows=Windows(address, message_bytes, max_tokens, form.num_topk),
        layout=layout,
        signature=zlib.crc32(repr((tuple(form), max_tokens)).encode()) >> 1,
        found=Found(
            tokens=torch.zeros(num_ranks, dtype=torch.int64, device=device),
            counts=torch.zeros(blocks, num_experts + num_ranks, dtype=torch.int32, device=device),
            bad=torch.zeros(blocks, 2, dtype=torch.int32, device=device),
        ),
        scratch=make_scratch(num_ranks, num_experts, device),
        arrived=make_arrived(num_ranks, num_experts, num_local, device)._replace(tokens_per_expert=tokens_per_expert),
        routes=torch.full((num_ranks, max_tokens, form.num_topk), -1, dtype=torch.int64, device=device),
        dispatched=torch.zeros(1, dtype=torch.int64, device=device),
        combined=torch.zeros(1, dtype=torch.int64, device=device),
    )
