"""The text: the language documentation that every Python ships, as bytes, and what simple models make of it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Text", "baselines", "load_text", "sample_windows", "window_grid"]

NUM_SYMBOLS = 256
_BLOCK = 4096
_HELD_OUT_EVERY = 10


@dataclass(frozen=True)
class Text:
    """Bytes to learn from and bytes to be judged by.

    Attributes:
        train: `[n]` int64, values 0..255.
        held_out: `[m]` int64, values 0..255; no paragraph of it occurs in `train`.
    """

    train: Tensor
    held_out: Tensor


def load_text() -> Text:
    """Reads `pydoc_data.topics`.

    Many topics repeat parts of others, so each paragraph is kept once; otherwise the held-out text would be learned by
    heart. Of every ten blocks of 4096 bytes the last is held out.
    """
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    paragraphs: dict[str, None] = {}
    for name in sorted(topics):
        paragraphs.update((part.rstrip(), None) for part in topics[name].split("\n\n") if part.strip())
    train, held_out = bytearray(), bytearray()
    size = 0
    for paragraph in paragraphs:
        data = paragraph.encode() + b"\n\n"
        is_held_out = size // _BLOCK % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
        (held_out if is_held_out else train).extend(data)
        size += len(data)
    return Text(_as_symbols(train), _as_symbols(held_out))


def sample_windows(symbols: Tensor, *, num_windows: int, length: int, seed: int) -> Tensor:
    """`[num_windows, length + 1]` int64: windows from random places, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    begins = torch.randint(0, symbols.numel() - length, (num_windows,), generator=generator)
    return symbols[begins.unsqueeze(1) + torch.arange(length + 1)]


def window_grid(symbols: Tensor, *, length: int) -> Tensor:
    """`[n, length + 1]` int64: all the windows that stand side by side, each byte predicted once."""
    begins = torch.arange((symbols.numel() - 1) // length) * length
    return symbols[begins.unsqueeze(1) + torch.arange(length + 1)]


def baselines(text: Text) -> dict[str, float]:
    """Held-out loss, in nats per byte, of models that count bytes and pairs of bytes in the training text.

    Counts are smoothed: pairs towards single bytes, single bytes towards a uniform guess.
    """
    ones = torch.bincount(text.train, minlength=NUM_SYMBOLS).double() + 1
    single = ones / ones.sum()
    pairs = torch.bincount(text.train[:-1] * NUM_SYMBOLS + text.train[1:], minlength=NUM_SYMBOLS**2)
    pairs = pairs.view(NUM_SYMBOLS, NUM_SYMBOLS).double() + single
    after = pairs / pairs.sum(dim=1, keepdim=True)
    previous, current = text.held_out[:-1], text.held_out[1:]
    return {
        "unigram": -single[current].log().mean().item(),
        "bigram": -after[previous, current].log().mean().item(),
    }


def _as_symbols(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8).long()
