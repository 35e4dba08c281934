"""What is measured, and how many bytes and operations that takes. Pure functions of plain numbers.

T tokens of a rank   K num_topk   H hidden   I intermediate   E experts   N rows of all experts   R ranks
"""

from __future__ import annotations

import dataclasses

__all__ = [
    "FULL",
    "QUICK",
    "TINY",
    "Model",
    "Sizes",
    "combine_bytes",
    "layer_flops",
    "low_latency_bytes",
    "product_flops",
    "push_bytes",
    "row_counts",
    "swiglu_flops",
    "weight_bytes",
]


@dataclasses.dataclass(frozen=True)
class Model:
    """The experts of a published model, from its configuration file.

    Attributes:
        hidden: `hidden_size`.
        intermediate: `moe_intermediate_size`.
        num_experts: routed experts of a layer.
    """

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    num_topk: int


_DEEPSEEK_V3 = Model("DeepSeek-V3", 7168, 2048, 256, 8)
_QWEN3 = Model("Qwen3-235B-A22B", 4096, 1536, 128, 8)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of all parts.

    Attributes:
        num_ranks: virtual ranks, all on one device.
        tokens: of each rank, throughput; `decode_tokens`: low latency.
        train_experts: local experts of a training step, `train_rows` rows each on average.
        decode_rows: rows per expert of decode steps; the experts are those of one of `num_ranks` ranks.
        loads: "balanced", "zipf".
        layer_tokens, layer_experts: of the layer, which has the first model's other sizes.
        signal_rounds: round trips that are timed together.
    """

    num_ranks: int
    tokens: int
    decode_tokens: int
    models: tuple[Model, ...]
    loads: tuple[str, ...]
    train_experts: int
    train_rows: int
    decode_rows: tuple[int, ...]
    layer_tokens: int
    layer_experts: int
    signal_rounds: int

    @property
    def exchange(self) -> Model:
        """The model whose rows are pushed and combined."""
        return self.models[0]


FULL = Sizes(8, 4096, 128, (_DEEPSEEK_V3, _QWEN3), ("balanced", "zipf"), 8, 4096, (1, 8, 64), 4096, 32, 32)
QUICK = dataclasses.replace(FULL, models=(_DEEPSEEK_V3,), loads=("balanced",), decode_rows=(1, 64), signal_rounds=16)
_TOY = Model("toy", 48, 16, 6, 2)
TINY = Sizes(3, 5, 3, (_TOY,), ("balanced",), 2, 4, (1,), 6, 4, 2)
"""For rehearsals without a GPU: every path, no meaningful time."""


def push_bytes(tokens: int, num_routes: int, row_bytes: int) -> int:
    """Each row is read once and written once per route."""
    return (tokens + num_routes) * row_bytes


def combine_bytes(tokens: int, num_routes: int, row_bytes: int) -> int:
    """Each route's row is read, each token's row is written."""
    return (num_routes + tokens) * row_bytes


def low_latency_bytes(tokens: int, num_routes: int, row_bytes: int) -> int:
    """What a dispatch and a combine cannot do without; a message that is copied out of a window takes more."""
    return push_bytes(tokens, num_routes, row_bytes) + combine_bytes(tokens, num_routes, row_bytes)


def product_flops(num_rows: int, num_inner: int, num_columns: int) -> int:
    """One multiplication and one addition per element of the inner dim."""
    return 2 * num_rows * num_inner * num_columns


def swiglu_flops(num_rows: int, hidden: int, intermediate: int) -> int:
    """Gate and up, then down; the activation is not counted."""
    return product_flops(num_rows, hidden, 2 * intermediate) + product_flops(num_rows, intermediate, hidden)


def layer_flops(tokens: int, num_topk: int, num_experts: int, hidden: int, intermediate: int) -> int:
    """Forward, and twice as much backward: experts and the router's gate."""
    forward = swiglu_flops(tokens * num_topk, hidden, intermediate) + product_flops(tokens, hidden, num_experts)
    return 3 * forward


def weight_bytes(num_weights: int, itemsize: int) -> int:
    """Every expert's matrices are read once."""
    return num_weights * itemsize


def row_counts(load: str, num_rows: int, num_experts: int) -> list[int]:
    """Rows of each expert: all alike, or as 1 / (1 + place) ("zipf"); they sum to `num_rows`.

    Raises:
        ValueError: another load.
    """
    if load not in ("balanced", "zipf"):
        raise ValueError(f"load must be 'balanced' or 'zipf', got {load!r}")
    shares = [1.0 if load == "balanced" else 1 / (1 + place) for place in range(num_experts)]
    ends = [0]
    for place in range(1, num_experts + 1):
        ends.append(round(num_rows * sum(shares[:place]) / sum(shares)))
    return [end - begin for begin, end in zip(ends[:-1], ends[1:], strict=True)]
