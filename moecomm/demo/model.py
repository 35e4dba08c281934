"""A small transformer language model over bytes whose MLPs are Mixture-of-Experts layers.

B windows, S bytes of a window, H hidden, V = 256 symbols.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moecomm.communicator import Communicator
from moecomm.demo.settings import Settings
from moecomm.demo.stopwatch import TimedCommunicator
from moecomm.demo.text import NUM_SYMBOLS
from moecomm.groups import Group
from moecomm.nn import GroupedExperts, MoELayer, TopKRouter

__all__ = ["LanguageModel", "make_communicator", "rotate"]


def make_communicator(group: Group, settings: Settings, *, max_tokens_per_rank: int | None = None) -> TimedCommunicator:
    """The one communicator that all layers share, and that is to be closed when they are done.

    Arguments:
        max_tokens_per_rank: tokens of a low-latency call; None = a rank's share of a training batch.
    """
    communicator = Communicator(
        group,
        num_experts=settings.experts,
        hidden=settings.hidden,
        num_topk=settings.topk,
        max_tokens_per_rank=max_tokens_per_rank or settings.window * -(-settings.batch // group.size),
        transport=settings.transport,
    )
    return TimedCommunicator(communicator)


class Attention(nn.Module):
    """Causal self-attention with rotary positions. `[B, S, H]` to `[B, S, H]`."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        num_windows, length, hidden = x.shape
        qkv = self.qkv(x).view(num_windows, length, 3, self.num_heads, hidden // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        positions = torch.arange(length, device=x.device)
        mixed = F.scaled_dot_product_attention(rotate(query, positions), rotate(key, positions), value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(num_windows, length, hidden))
        return out


class Block(nn.Module):
    """Attention, then experts; each reads a normalised copy and adds to the stream."""

    def __init__(self, settings: Settings, layer: int, communicator: TimedCommunicator, loss_group: Group) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(settings.hidden)
        self.attention = Attention(settings.hidden, settings.heads)
        self.experts_norm = nn.RMSNorm(settings.hidden)
        router = TopKRouter(
            settings.hidden,
            settings.experts,
            settings.topk,
            balance_coefficient=settings.balance_coefficient,
            z_coefficient=settings.z_coefficient,
            loss_group=loss_group,
        )
        carrier = cast("Communicator", communicator)
        experts = GroupedExperts.for_communicator(
            carrier, settings.intermediate, seed=settings.seed * settings.layers + layer, std=0.06
        )
        self.moe = MoELayer(router, experts, communicator=carrier)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        moved: Tensor = x + self.moe(self.experts_norm(x))
        return moved


class LanguageModel(nn.Module):
    """Predicts the next byte.

    Its first weights depend on the seed only, not on the number of ranks.

    Arguments:
        settings: sizes and seed.
        communicator: see `make_communicator`.
        loss_group: the ranks that share a batch.
    """

    def __init__(self, settings: Settings, *, communicator: TimedCommunicator, loss_group: Group) -> None:
        super().__init__()
        torch.manual_seed(settings.seed)
        self.embedding = nn.Embedding(NUM_SYMBOLS, settings.hidden)
        nn.init.normal_(self.embedding.weight, std=0.5)
        self.blocks = nn.ModuleList(
            Block(settings, layer, communicator, loss_group) for layer in range(settings.layers)
        )
        self.norm = nn.RMSNorm(settings.hidden)
        self.head = nn.Linear(settings.hidden, NUM_SYMBOLS, bias=False)

    def forward(self, symbols: Tensor) -> Tensor:
        """Logits `[B, S, V]` for `symbols` `[B, S]` int64."""
        x = self.embedding(symbols)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, windows: Tensor) -> Tensor:
        """Sum over all bytes of the cross entropy, in nats.

        Arguments:
            windows: `[B, S + 1]` int64, each byte is predicted from those before it. B may be 0.
        """
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.reshape(-1, NUM_SYMBOLS), windows[:, 1:].reshape(-1), reduction="sum")

    def expert_loads(self) -> Tensor:
        """`[layers, E]` int64: routes of this rank's tokens to each expert in the last forward."""
        outputs = [module.last_router_output for module in self.modules() if isinstance(module, MoELayer)]
        return torch.stack([output.num_tokens_per_expert for output in outputs if output is not None])


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding: pairs (d, d + D/2) turn with the position.

    Arguments:
        x: `[..., D]`, D even.
        positions: integers, as many dims as `x` without the last or fewer; the position of each vector.
    """
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions.unsqueeze(-1) * frequencies
    first, second = x[..., :half], x[..., half:]
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
