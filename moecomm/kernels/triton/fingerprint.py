"""The fingerprint of expert ids, and the search for ids that are none."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moecomm.kernels.summary import NOWHERE, finished_fingerprint
from moecomm.kernels.triton.compile_case import CompileCase
from moecomm.kernels.triton.runtime import launch, num_blocks

__all__ = ["checked_fingerprint", "compile_cases", "summarize_ids"]

_IDS = 128


@triton.jit
def _mixed(value: tl.tensor, position: tl.tensor) -> tl.tensor:
    """As in csrc/cpu/routing.cc: the sum of these over all positions depends on values and order."""
    x = (value + 0x9E3779B97F4A7C15) * (2 * position + 0xBF58476D1CE4E5B9)
    x = x ^ (x >> 32)
    x = x * 0x94D049BB133111EB
    return x ^ (x >> 29)


@triton.jit(do_not_specialize=["num_ids", "num_experts"])
def fingerprint_kernel(
    ids: tl.tensor,
    num_ids: tl.int64,
    num_experts: tl.int32,
    sums: tl.tensor,
    IDS: tl.constexpr,
) -> None:
    """Per block: sums[b, 0] the sum of mixed ids, sums[b, 1] the first position of a bad id or 2^63 - 1."""
    block = tl.program_id(0).to(tl.int64)
    position = block * IDS + tl.arange(0, IDS)
    is_id = position < num_ids
    id = tl.load(ids + position, mask=is_id, other=-1).to(tl.int64)
    mixed = _mixed(id.to(tl.uint64, bitcast=True), position.to(tl.uint64, bitcast=True))
    is_bad = is_id & ((id < -1) | (id >= num_experts))
    tl.store(sums + block * 2, tl.sum(tl.where(is_id, mixed, 0).to(tl.int64, bitcast=True), axis=0))
    tl.store(sums + block * 2 + 1, tl.min(tl.where(is_bad, position, 0x7FFFFFFFFFFFFFFF), axis=0))


def checked_fingerprint(ids: Tensor, expert_rank: Tensor, num_ranks: int) -> int:
    """What `count_routes` gives, for contiguous `[T, K]` ids. Waits for the device.

    Raises:
        ValueError: as in `count_routes`; or an expert is at no rank.
    """
    num_tokens, num_topk = ids.shape
    num_experts = expert_rank.numel()
    sums = torch.empty(num_blocks(ids.numel(), _IDS) + 1, 2, dtype=torch.int64, device=ids.device)
    launch(fingerprint_kernel, sums.shape[0] - 1, ids.device, ids, ids.numel(), num_experts, sums, IDS=_IDS)
    sums[-1, 0], sums[-1, 1] = 0, NOWHERE
    is_rank = (expert_rank >= 0) & (expert_rank < num_ranks)
    total, first_bad, is_fine = torch.stack((sums[:, 0].sum(), sums[:, 1].min(), is_rank.all().long())).tolist()
    if not is_fine:
        expert, rank = next((e, r) for e, r in enumerate(expert_rank.tolist()) if not 0 <= r < num_ranks)
        raise ValueError(f"expert_rank[{expert}] = {rank} is not a rank: valid ranks are 0 to {num_ranks - 1}")
    if first_bad != NOWHERE:
        t, k = divmod(first_bad, num_topk)
        raise ValueError(
            f"topk_idx[{t}, {k}] = {int(ids[t, k])} is not an expert: valid ids are 0 to {num_experts - 1}, "
            "or -1 for no expert"
        )
    return finished_fingerprint(total, num_tokens, num_topk)


def summarize_ids(ids: Tensor, num_experts: int, head: Tensor) -> None:
    """Fills the head of a summary, see `moecomm.kernels.summary`, for contiguous `[T, K]` ids; nobody waits."""
    sums = torch.empty(num_blocks(ids.numel(), _IDS) + 1, 2, dtype=torch.int64, device=ids.device)
    launch(fingerprint_kernel, sums.shape[0] - 1, ids.device, ids, ids.numel(), num_experts, sums, IDS=_IDS)
    sums[-1, 0], sums[-1, 1] = 0, NOWHERE
    torch.sum(sums[:, 0], dim=0, out=head[0])
    torch.amin(sums[:, 1], dim=0, out=head[1])
    if ids.numel():
        position = head[1:2].clamp(max=ids.numel() - 1)
        head[2:3].copy_(ids.view(-1).gather(0, position))


def compile_cases() -> list[CompileCase]:
    """Ids of both widths."""
    return [
        CompileCase(
            name=f"fingerprint {ids}",
            kernel=fingerprint_kernel,
            signature={"ids": ids, "num_ids": "i64", "num_experts": "i32", "sums": "*i64", "IDS": "constexpr"},
            constexprs={"IDS": _IDS},
        )
        for ids in ("*i32", "*i64")
    ]
