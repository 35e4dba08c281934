"""The Mixture-of-Experts layer: router, dispatch, experts, combine."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn

from moecomm.nn.experts import GroupedExperts
from moecomm.nn.router import TopKRouter
from moecomm.nn.router_output import RouterOutput

if TYPE_CHECKING:
    from moecomm.communicator import Communicator

__all__ = ["MoELayer", "set_mode", "take_aux_loss"]

_MODES = ("throughput", "low_latency")


@final
class MoELayer(nn.Module):
    """A drop-in for an MLP: `[..., H]` in, `[..., H]` out, with experts spread over the ranks of a communicator.

        out = sum over k of topk_weights[t, k] * expert[topk_idx[t, k]](x[t])     (+ shared_expert(x))

    Every rank brings its own tokens, as many as it likes, none included. Calls are collective: every rank of the group
    must make the same calls in the same order, backward included.

    Gradients. Let every rank's loss be a mean over its own tokens, and the objective the mean of these losses over the
    ranks, as in data parallelism. Then after backward
      - gradients of the *experts* already are the sum over the group of what each rank's loss gives: divide them by
        `gradient_divide_factor`, the number of ranks (where copies of the experts exist in other EP groups, sum over
        the copies first, and divide by the number of all ranks);
      - gradients of everything else (router and shared expert too) are of this rank's loss alone: average them.
    Neither depends on the number of ranks otherwise. `synchronize_gradients` does both.

    Auxiliary losses of the router are not added to anything: call `take_aux_loss` after the forward and add what it
    returns to the loss.

    Works under autocast (rows travel in its dtype), activation checkpointing (non-reentrant; see `keep_exchanges`) and
    torch.compile (as one graph).

    Decoding. With `mode="low_latency"` a call has one hop and fixed shapes, which is faster for the few tokens of a
    decode step, takes at most `max_tokens_per_rank` tokens per rank, and gives the same bits. The mode may change
    between calls, on all ranks alike: `layer.mode = "low_latency"`, or `set_mode` for all layers of a model.

    Arguments:
        router: for H features, E experts and K routes per token, as `communicator`.
        experts: those that `communicator` places on this rank; see `GroupedExperts.for_communicator`.
        shared_expert: a module `[T, H] -> [T, H]` that every token passes through; replicated, no routing.
        communicator: carries the rows. Not part of the module's state, and left open when the module dies.
        mode: "throughput" or "low_latency".

    Attributes:
        mode: of the calls to come.
        gradient_divide_factor: number of ranks, see above.
        last_router_output: `RouterOutput` of the last forward, without gradients; None before the first.

    Raises:
        ValueError: parts that do not fit together, with both values.
    """

    def __init__(
        self,
        router: TopKRouter,
        experts: GroupedExperts,
        shared_expert: nn.Module | None = None,
        *,
        communicator: Communicator,
        mode: str = "throughput",
    ) -> None:
        super().__init__()
        _check_mode(mode)
        for name, have, want in (
            ("router.hidden", router.hidden, communicator.hidden),
            ("router.num_experts", router.num_experts, communicator.num_experts),
            ("router.num_topk", router.num_topk, communicator.num_topk),
            ("experts.hidden", experts.hidden, communicator.hidden),
            ("experts.expert_ids", experts.expert_ids, tuple(communicator.local_experts)),
        ):
            if have != want:
                raise ValueError(f"{name} must be {want} as in the communicator, got {have}")
        self.router = router
        self.experts = experts
        self.shared_expert = shared_expert
        self.communicator = communicator
        self.mode = mode
        self.gradient_divide_factor = communicator.num_ranks
        self.last_router_output: RouterOutput | None = None
        self._aux_loss: Tensor | None = None

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Sends every token through its experts.

        Arguments:
            x: `[..., H]` floating; zero tokens are fine.
            padding_mask: bool, the shape of `x` without H; True = padding: goes to no expert, gives a zero row (plus
                the shared expert's).

        Returns:
            The shape of `x`; its dtype, or autocast's.

        Raises:
            ValueError: the last dim of `x` is not H, the mask has another shape or dtype, or there are more than
                `max_tokens_per_rank` tokens in low-latency mode.
        """
        routing = self.router(x, padding_mask)
        self._remember(routing)
        rows = x.reshape(-1, x.shape[-1])
        if torch.is_autocast_enabled(x.device.type):
            rows = rows.to(torch.get_autocast_dtype(x.device.type))
        out, shared = self._exchange(rows, routing)
        return (out if shared is None else out + shared).view(x.shape)

    def take_aux_loss(self) -> Tensor:
        """The router's losses in the last forward, added up, with their graph; then forgets them.

        Returns:
            Scalar fp32; zero when there is nothing to take: no forward with gradients since the last call, or no
            coefficient set.
        """
        loss, self._aux_loss = self._aux_loss, None
        return torch.zeros((), device=self.router.weight.device) if loss is None else loss

    def _exchange(self, rows: Tensor, routing: RouterOutput) -> tuple[Tensor, Tensor | None]:
        """The routed experts' sum and the shared expert's output."""
        communicator = self.communicator
        received = communicator.dispatch(rows, routing.topk_idx, mode=self.mode, layout="expert_major")
        assert received.offsets is not None
        if torch.compiler.is_compiling():
            y = self.experts(received.x, received.offsets)
            out = communicator.combine(y, received.handle, routing.topk_weights)
            return out, None if self.shared_expert is None else self.shared_expert(rows)
        buffer = communicator.combine_buffer(received.handle, received.x.dtype)
        y = self.experts(received.x, received.offsets, out=buffer)
        if self.shared_expert is None:
            return communicator.combine(y, received.handle, routing.topk_weights), None
        # The shared expert runs while slower ranks finish their experts.
        work = communicator.combine_async(y, received.handle, routing.topk_weights)
        shared = self.shared_expert(rows)
        return work.wait(), shared

    def _remember(self, routing: RouterOutput) -> None:
        self.last_router_output = routing.detach()
        # A forward inside a backward is a recomputation, whose graph nobody will ask for.
        is_recomputation = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        loss = routing.balance_loss + routing.z_loss
        self._aux_loss = loss if loss.requires_grad and not is_recomputation else None


def set_mode(module: nn.Module, mode: str) -> None:
    """Sets the mode of every MoE layer within `module`: "throughput" or "low_latency". Not collective by itself.

    Raises:
        ValueError: another mode.
    """
    _check_mode(mode)
    for layer in module.modules():
        if isinstance(layer, MoELayer):
            layer.mode = mode


def _check_mode(mode: str) -> None:
    if mode not in _MODES:
        raise ValueError(f"mode must be one of {list(_MODES)}, got {mode!r}")


def take_aux_loss(module: nn.Module) -> Tensor:
    """`MoELayer.take_aux_loss` of every MoE layer within `module`, added up. Scalar fp32."""
    losses = [layer.take_aux_loss() for layer in module.modules() if isinstance(layer, MoELayer)]
    return torch.stack(losses).sum() if losses else torch.zeros(())
