"""Inputs of the kernel tests: routings, memory that plays the part of the ranks, numbers that are easy to get wrong."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from moecomm.kernels import kernels_for
from moecomm.kernels.base import rank_of, row_of

FLOAT_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    got, want = (t.contiguous().view(_BITS[t.element_size()]) for t in (got, want))
    assert torch.equal(got, want), f"{int((got != want).sum())} of {got.numel()} differ"


def ids_of(num_tokens: int, num_topk: int, num_experts: int, *, seed: int = 0) -> torch.Tensor:
    """Expert ids with repeats and with a fifth of them -1."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, num_experts, (num_tokens, num_topk), generator=generator)
    return ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -1)


def expert_ranks(num_experts: int, num_ranks: int) -> torch.Tensor:
    """Experts in blocks, but the first and last rank swapped so that rank order is not expert order."""
    ranks = torch.arange(num_experts) * num_ranks // num_experts
    return (num_ranks - 1 - ranks).to(torch.int32)


@dataclass(frozen=True)
class Plan:
    routes: torch.Tensor
    num_rows: list[int]  # by rank


def plans(ids: torch.Tensor, expert_rank: torch.Tensor, num_ranks: int, layout: str) -> Plan:
    """The reference plan of one rank that is alone in sending."""
    reference = kernels_for("reference")
    num_experts = expert_rank.numel()
    counts = torch.empty(num_experts + num_ranks, dtype=torch.int32)
    reference.count_routes(ids, expert_rank, num_ranks, counts)
    if layout == "flat":
        bases = torch.zeros(num_ranks, dtype=torch.int64)
        return Plan(reference.plan_flat(ids, expert_rank, bases), counts[num_experts:].tolist())
    bases = torch.zeros(num_experts, dtype=torch.int64)
    num_rows = [0] * num_ranks
    for expert, rank in enumerate(expert_rank.tolist()):
        bases[expert] = num_rows[rank]
        num_rows[rank] += int(counts[expert])
    return Plan(reference.plan_expert_major(ids, expert_rank, bases), num_rows)


@dataclass(frozen=True)
class Memory:
    """Rows of all ranks in one poisoned allocation, with gaps between the ranks."""

    bytes: torch.Tensor
    addresses: list[int]
    columns: int
    dtype: torch.dtype

    def at(self, route: int) -> torch.Tensor:
        row_bytes = self.columns * self.dtype.itemsize
        begin = self.addresses[rank_of(route)] - self.bytes.data_ptr() + row_of(route) * row_bytes
        return self.bytes[begin : begin + row_bytes].clone().view(self.dtype)


def fresh_memory(num_rows: list[int], columns: int, dtype: torch.dtype, *, offset: int = 0, fill=None) -> Memory:
    row_bytes = columns * dtype.itemsize
    begins, end = [], 64 + offset
    for rows in num_rows:
        begins.append(end)
        end += rows * row_bytes + 64
    memory = torch.full((end + 64,), 0xA5, dtype=torch.uint8)
    for begin, rows in zip(begins, num_rows, strict=True):
        if fill is not None and rows * columns:
            memory[begin : begin + rows * row_bytes] = fill((rows, columns)).view(torch.uint8).flatten()
    return Memory(memory, [memory.data_ptr() + begin for begin in begins], columns, dtype)


def interesting(shape: tuple[int, int], dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    """Ordinary numbers mixed with zeros of both signs, infinities, NaN, tiny and huge ones."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.finfo(dtype)
    special = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), -float("nan"), info.max, info.min, info.tiny]
        + [info.tiny / 4, info.smallest_normal, 1 + info.eps, 1 - info.eps / 2],
        dtype=torch.float64,
    ).to(dtype)
    ordinary = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    chosen = torch.randint(0, special.numel(), shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.2, special[chosen], ordinary)


def bytes_at(address: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
