"""What a router decides."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["RouterOutput"]


@dataclass(frozen=True, kw_only=True)
class RouterOutput:
    """What a router decided for T tokens.

    Attributes:
        topk_idx: `[T, K]` int64, global expert ids, best first; -1 = no expert (padding).
        topk_weights: `[T, K]` fp32, 0 where `topk_idx` is -1; carries the gradient to the router.
        logits: `[T, E]` fp32.
        scores: `[T, E]` fp32, softmax or sigmoid of the logits, before renormalising, scaling and selection bias.
        balance_loss: scalar, the load balance loss times its coefficient; 0 when the coefficient is 0.
        z_loss: scalar, the z-loss times its coefficient; 0 when the coefficient is 0.
        num_tokens_per_expert: `[E]` int64, routes of this rank's tokens to each expert.
    """

    topk_idx: Tensor
    topk_weights: Tensor
    logits: Tensor
    scores: Tensor
    balance_loss: Tensor
    z_loss: Tensor
    num_tokens_per_expert: Tensor

    def detach(self) -> RouterOutput:
        """The same values without gradients."""
        return RouterOutput(
            topk_idx=self.topk_idx,
            topk_weights=self.topk_weights.detach(),
            logits=self.logits.detach(),
            scores=self.scores.detach(),
            balance_loss=self.balance_loss.detach(),
            z_loss=self.z_loss.detach(),
            num_tokens_per_expert=self.num_tokens_per_expert,
        )
