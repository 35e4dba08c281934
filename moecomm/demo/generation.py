"""Text from a trained model, one byte after the other."""

from __future__ import annotations

import torch

from moecomm.demo.model import LanguageModel

__all__ = ["generate"]


@torch.no_grad()
def generate(
    model: LanguageModel, prompt: str, *, num_bytes: int, window: int, temperature: float = 0.5, seed: int = 0
) -> str:
    """Continues `prompt` by `num_bytes` bytes. Collective: every rank of the model's group must make the same call.

    Arguments:
        window: bytes that the model looks back.
        temperature: 0 = always the likeliest byte.
        seed: of the drawing.

    Returns:
        The continuation without the prompt; bytes that are no UTF-8 are replaced.
    """
    generator = torch.Generator().manual_seed(seed)
    symbols = torch.tensor(list(prompt.encode()), dtype=torch.int64)
    num_given = symbols.numel()
    for _ in range(num_bytes):
        logits = model(symbols[-window:].unsqueeze(0))[0, -1]
        if temperature > 0:
            symbol = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
        else:
            symbol = logits.argmax().view(1)
        symbols = torch.cat([symbols, symbol])
    return bytes(symbols[num_given:].tolist()).decode(errors="replace")
