"""One decode step of the demo's model: one byte per slot, with the keys and values of the bytes before it kept.

S slots, H hidden, D = H / heads, W window, V = 256 symbols.

Every tensor has the same shape in every step, whichever slots are empty, and the experts multiply row by row. So what
comes out for a slot depends, to the last bit, on its own bytes alone: not on what else is in the batch, nor on how many
ranks the experts are spread over.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from moecomm.demo.model import Attention, Block, LanguageModel, rotate

__all__ = ["Decoder"]


class Decoder:
    """The kept keys and values of S slots. Calls are collective as those of the model.

    Arguments:
        model: whose experts are made for row-by-row products here.
        num_slots: S.
        window: W, bytes that attention looks back.
    """

    def __init__(self, model: LanguageModel, *, num_slots: int, window: int) -> None:
        self._model = model
        self._window = window
        self._blocks = [cast("Block", block) for block in model.blocks]
        self._every_slot = torch.arange(num_slots)
        hidden, heads = model.embedding.embedding_dim, self._blocks[0].attention.num_heads
        shape = (len(self._blocks), num_slots, heads, window, hidden // heads)
        self._keys, self._values = torch.zeros(shape), torch.zeros(shape)
        for block in self._blocks:
            block.moe.experts.row_by_row = True

    @torch.no_grad()
    def step(self, symbols: Tensor, positions: Tensor) -> Tensor:
        """Takes one byte of each slot.

        Arguments:
            symbols: `[S]` int64.
            positions: `[S]` int64: of the byte in its slot's text; 0 = the slot begins anew, -1 = it is empty, goes to
                no expert, and its result means nothing.

        Returns:
            Logits of the next byte, `[S, V]`.
        """
        is_empty = positions < 0
        positions = positions.clamp(min=0)
        # Keys carry their position, so their order does not matter: the oldest gives way to the newest.
        is_visible = torch.arange(self._window) <= positions.unsqueeze(1)
        x = self._model.embedding(symbols)
        for layer, block in enumerate(self._blocks):
            x = x + self._attend(layer, block.attention, block.attention_norm(x), positions, is_visible)
            x = x + block.moe(block.experts_norm(x), is_empty)
        logits: Tensor = self._model.head(self._model.norm(x))
        return logits

    def _attend(self, layer: int, attention: Attention, x: Tensor, positions: Tensor, is_visible: Tensor) -> Tensor:
        num_slots, hidden = x.shape
        qkv = attention.qkv(x).view(num_slots, 3, attention.num_heads, -1)
        query, key, value = qkv.unbind(1)
        keys, values = self._keys[layer], self._values[layer]
        place = positions % self._window
        keys[self._every_slot, :, place] = rotate(key, positions.unsqueeze(1))
        values[self._every_slot, :, place] = value
        query = rotate(query, positions.unsqueeze(1)).unsqueeze(2)
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=is_visible[:, None, None, :])
        out: Tensor = attention.out(mixed.reshape(num_slots, hidden))
        return out
