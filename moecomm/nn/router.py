"""The router: from token rows to experts and weights."""

from __future__ import annotations

import math
from typing import Literal, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moecomm.groups import Group, as_group
from moecomm.nn.choice import choose_experts, limit_to_groups
from moecomm.nn.losses import load_balance_loss, router_z_loss
from moecomm.nn.reductions import sum_over_group
from moecomm.nn.router_output import RouterOutput

__all__ = ["TopKRouter"]


@final
class TopKRouter(nn.Module):
    """Linear gate, scores, top-k.

    The gate is computed in fp32 whatever the dtype of the input or of the weight, under autocast too: bf16 logits
    change the experts of several percent of all tokens. (fp64 inputs with an fp64 weight stay fp64.)

        logits  = x @ weight.T (+ bias)
        scores  = softmax(logits) over all experts, or sigmoid(logits)
        topk    = top-k of scores (+ selection_bias), within the best groups when they are limited
        weights = scores at topk, / their sum when `renormalize`, * `scaling_factor`

    Softmax with `renormalize` is the same as a softmax over the k chosen logits.

    Arguments:
        hidden: H, features of a token.
        num_experts: E, over all ranks.
        num_topk: K, experts per token.
        score: "softmax" or "sigmoid".
        renormalize: make the K weights of a token sum to 1 (before scaling).
        scaling_factor: factor on the weights.
        num_expert_groups: split the experts into that many contiguous groups of equal size; None = no groups.
        num_limited_groups: groups a token may choose from; needed with `num_expert_groups`. A group is worth the sum of
            its two highest (biased) scores with "sigmoid" (DeepSeek-V3), its highest with "softmax" (DeepSeek-V2).
        use_selection_bias: hold a buffer `selection_bias` `[E]` fp32 that is added to the scores for the choice only,
            never to the weights; see `update_selection_bias`.
        use_gate_bias: add a trained `bias` `[E]` to the logits.
        balance_coefficient: factor of the load balance loss; 0 = do not compute it.
        z_coefficient: factor of the z-loss; 0 = do not compute it.
        loss_group: the ranks whose tokens make up the batch. With it, the mean over these ranks of each loss is the
            loss of the whole batch, independent of the number of ranks (one all-reduce of E + 1 integers per call);
            None = each rank balances its own tokens.
        dtype: of the weight, fp32 when None.

    Raises:
        ValueError: sizes that do not fit together, with both values.
    """

    selection_bias: Tensor | None

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        num_topk: int,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        renormalize: bool = True,
        scaling_factor: float = 1.0,
        num_expert_groups: int | None = None,
        num_limited_groups: int | None = None,
        use_selection_bias: bool = False,
        use_gate_bias: bool = False,
        balance_coefficient: float = 0.0,
        z_coefficient: float = 0.0,
        loss_group: Group | dist.ProcessGroup | DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if hidden < 1 or num_experts < 1:
            raise ValueError(f"hidden and num_experts must be at least 1, got {hidden} and {num_experts}")
        if not 1 <= num_topk <= num_experts:
            raise ValueError(f"num_topk must be within 1 .. num_experts = {num_experts}, got {num_topk}")
        if score not in ("softmax", "sigmoid"):
            raise ValueError(f"score must be 'softmax' or 'sigmoid', got {score!r}")
        _check_groups(num_experts, num_topk, num_expert_groups, num_limited_groups)
        self.hidden = hidden
        self.num_experts = num_experts
        self.num_topk = num_topk
        self.score = score
        self.renormalize = renormalize
        self.scaling_factor = scaling_factor
        self.num_expert_groups = num_expert_groups
        self.num_limited_groups = num_limited_groups
        self.balance_coefficient = balance_coefficient
        self.z_coefficient = z_coefficient
        self.loss_group = None if loss_group is None else as_group(loss_group)
        dtype = torch.float32 if dtype is None else dtype
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype)) if use_gate_bias else None
        bias = torch.zeros(num_experts, device=device, dtype=torch.float32) if use_selection_bias else None
        self.register_buffer("selection_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight from a normal distribution of standard deviation 1 / sqrt(H); biases become 0."""
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.hidden))
        for bias in (self.bias, self.selection_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def extra_repr(self) -> str:
        return f"{self.hidden}, num_experts={self.num_experts}, num_topk={self.num_topk}, score={self.score!r}"

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> RouterOutput:
        """Routes T tokens.

        Arguments:
            x: `[T, H]`, or `[..., H]`, which counts as T rows; any floating dtype.
            padding_mask: bool, the shape of `x` without H; True = padding. Such a token gets no expert (-1) and weight
                0, counts in no loss, and its row may hold anything, NaN included.

        Raises:
            ValueError: the last dim of `x` is not H, or the mask has another shape or dtype.
        """
        if x.dim() < 1 or x.shape[-1] != self.hidden:
            raise ValueError(f"x must be [..., hidden = {self.hidden}], got {list(x.shape)}")
        is_padding = None
        if padding_mask is not None:
            if padding_mask.shape != x.shape[:-1] or padding_mask.dtype != torch.bool:
                raise ValueError(
                    f"padding_mask must be bool {list(x.shape[:-1])}, "
                    f"got {padding_mask.dtype} {list(padding_mask.shape)}"
                )
            is_padding = padding_mask.reshape(-1)
        with torch.autocast(device_type=x.device.type, enabled=False):
            return self._route(x.reshape(-1, self.hidden), is_padding)

    def update_selection_bias(self, num_tokens_per_expert: Tensor, *, rate: float = 1e-3) -> None:
        """Moves `selection_bias` by `rate` towards balance: up for experts below the mean load, down for those above.

        The balancing without a loss of DeepSeek-V3 (2024, section 2.1.2). Call it once per optimizer step; nothing is
        counted behind your back, so evaluation leaves no trace.

        Arguments:
            num_tokens_per_expert: `[E]` integer, the step's routes of this rank, summed over its micro-batches; summed
                over `loss_group` here, so that every rank makes the same move.
            rate: size of the move.

        Raises:
            ValueError: the router has no selection bias, or the counts have another shape.
        """
        if self.selection_bias is None:
            raise ValueError("update_selection_bias needs a router made with use_selection_bias=True")
        if num_tokens_per_expert.shape != (self.num_experts,):
            raise ValueError(
                f"num_tokens_per_expert must be [{self.num_experts}], got {list(num_tokens_per_expert.shape)}"
            )
        load = sum_over_group(num_tokens_per_expert, self.loss_group).to(torch.float64)
        with torch.no_grad():
            self.selection_bias += rate * torch.sign(load.mean() - load).to(self.selection_bias)

    def _route(self, x: Tensor, is_padding: Tensor | None) -> RouterOutput:
        gate_dtype = torch.promote_types(torch.float32, torch.promote_types(x.dtype, self.weight.dtype))
        if is_padding is not None:
            x = x.masked_fill(is_padding.unsqueeze(1), 0)
        bias = None if self.bias is None else self.bias.to(gate_dtype)
        logits = F.linear(x.to(gate_dtype), self.weight.to(gate_dtype), bias)
        scores = logits.softmax(dim=1) if self.score == "softmax" else logits.sigmoid()
        topk_idx = choose_experts(self._ranking(scores.detach()), self.num_topk)
        weights = scores.gather(1, topk_idx)
        if self.renormalize:
            # A sum of sigmoids can underflow to 0; the smallest normal number keeps the weights finite.
            weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(gate_dtype).tiny)
        if self.scaling_factor != 1.0:
            weights = weights * self.scaling_factor
        if is_padding is not None:
            topk_idx = topk_idx.masked_fill(is_padding.unsqueeze(1), -1)
            weights = weights.masked_fill(is_padding.unsqueeze(1), 0)
        counts = _count_routes(topk_idx, self.num_experts)
        balance_loss, z_loss = self._losses(logits, scores, counts, is_padding)
        return RouterOutput(
            topk_idx=topk_idx,
            topk_weights=weights,
            logits=logits,
            scores=scores,
            balance_loss=balance_loss,
            z_loss=z_loss,
            num_tokens_per_expert=counts,
        )

    def _ranking(self, scores: Tensor) -> Tensor:
        ranking = scores if self.selection_bias is None else scores + self.selection_bias.to(scores.dtype)
        if self.num_expert_groups is None or self.num_limited_groups is None:
            return ranking
        return limit_to_groups(
            ranking,
            num_groups=self.num_expert_groups,
            num_limited_groups=self.num_limited_groups,
            num_best=2 if self.score == "sigmoid" else 1,
        )

    def _losses(
        self, logits: Tensor, scores: Tensor, counts: Tensor, is_padding: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        nothing = torch.zeros((), dtype=logits.dtype, device=logits.device)
        if self.balance_coefficient == 0 and self.z_coefficient == 0:
            return nothing, nothing
        num_tokens = counts.new_full((1,), logits.shape[0]) if is_padding is None else (~is_padding).sum().view(1)
        totals = sum_over_group(torch.cat([counts, num_tokens]), self.loss_group)
        num_ranks = 1 if self.loss_group is None else self.loss_group.size
        # No tokens anywhere: every sum is an exact 0 and the divisor is only kept from being 0.
        token_scale = num_ranks / totals[-1].clamp(min=1).to(logits.dtype)
        balance_loss, z_loss = nothing, nothing
        if self.balance_coefficient != 0:
            probabilities = scores
            if self.score == "sigmoid":
                probabilities = scores / scores.sum(dim=1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
            if is_padding is not None:
                probabilities = probabilities.masked_fill(is_padding.unsqueeze(1), 0)
            loss = load_balance_loss(probabilities, totals[:-1], token_scale=token_scale)
            balance_loss = self.balance_coefficient * loss
        if self.z_coefficient != 0:
            is_counted = None if is_padding is None else ~is_padding
            z_loss = self.z_coefficient * router_z_loss(logits, is_counted, token_scale=token_scale)
        return balance_loss, z_loss


def _count_routes(topk_idx: Tensor, num_experts: int) -> Tensor:
    """`[E]` int64, how often each expert stands in `topk_idx`; -1 is nobody."""
    counts = topk_idx.new_zeros(num_experts + 1)
    flat = topk_idx.reshape(-1) + 1
    return counts.scatter_add(0, flat, torch.ones_like(flat))[1:]


def _check_groups(num_experts: int, num_topk: int, num_groups: int | None, num_limited: int | None) -> None:
    if (num_groups is None) != (num_limited is None):
        raise ValueError(
            f"num_expert_groups and num_limited_groups must be given together, got {num_groups} and {num_limited}"
        )
    if num_groups is None or num_limited is None:
        return
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_expert_groups must divide num_experts = {num_experts}, got {num_groups}")
    if not 1 <= num_limited <= num_groups:
        raise ValueError(f"num_limited_groups must be within 1 .. num_expert_groups = {num_groups}, got {num_limited}")
    if num_limited * (num_experts // num_groups) < num_topk:
        raise ValueError(
            f"num_limited_groups = {num_limited} groups of {num_experts // num_groups} experts "
            f"cannot give num_topk = {num_topk} experts"
        )
