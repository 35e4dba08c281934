"""What takes part in the benchmark: the interface of a dispatcher, and how one is found by its name.

Symbols: T tokens of this rank, H hidden, K top-k, E experts, N rows received, E_local experts of this rank.
"""

from __future__ import annotations

import abc
import importlib
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from moecomm.bench.config import BenchConfig
from moecomm.bench.traffic import Traffic

__all__ = ["Arrived", "Dispatcher", "Setup", "dispatcher_class"]

BUILT_IN = {
    "moecomm": "moecomm.bench.ours:MoecommDispatcher",
    "direct": "moecomm.bench.ours:DirectDispatcher",
    "hierarchical": "moecomm.bench.ours:HierarchicalDispatcher",
    "per_host": "moecomm.bench.ours:PerHostDispatcher",
    "gloo": "moecomm.bench.gloo:GlooDispatcher",
    "mpi": "moecomm.bench.mpi:MpiDispatcher",
    "throughput": "moecomm.bench.ours:ThroughputDispatcher",
}


@dataclass(frozen=True)
class Setup:
    """What a dispatcher is built from.

    Arguments:
        config: the run; sizes are the same on every rank.
        process_group: over all ranks; ours is constructed with it, others may exchange over it.
        rank: of this process.
        device: where the tensors live, as `Communicator` takes it; None = the CPU.
    """

    config: BenchConfig
    process_group: torch.distributed.ProcessGroup
    rank: int
    device: Any = None


class Arrived(Protocol):
    """What a dispatch brings, in the canonical order: by local expert, then source rank, source token and k.

    In layout `expert_major` the rows lie behind each other; in layout `slab` each expert's rows stand at the beginning
    of a slab of `capacity` rows.
    """

    @property
    def x(self) -> Tensor:
        """`[N, H]`, slab: `[E_local, capacity, H]`, of the rows' dtype."""

    @property
    def topk_weights(self) -> Tensor | None:
        """`[N]`, slab: `[E_local, capacity]`, float32: the weight of each row's route."""

    @property
    def num_tokens_per_expert(self) -> Tensor:
        """`[E_local]` integers, rows of each local expert."""


class Dispatcher(abc.ABC):
    """One way to carry rows to their experts and home again. All ranks make the same calls in the same order.

    Every operation has ended on this rank when it returns: what it returns may be read, what it was given written.
    """

    # Name in the table.
    name: ClassVar[str]
    # Whether combine adds in ascending k in float32 (float64 for float64) and rounds once, so that its answer is fixed
    # to the bit; otherwise the check allows for another order of additions.
    is_exact: ClassVar[bool] = False
    # Whether it does so host by host, rounds each host's sum to the dtype of the rows, and adds these likewise.
    sums_per_host: ClassVar[bool] = False

    @abc.abstractmethod
    def __init__(self, setup: Setup) -> None:
        """Get ready for the sizes of `setup`; called on all ranks together."""

    @property
    @abc.abstractmethod
    def transport(self) -> str:
        """By what the bytes travel."""

    @property
    def codec(self) -> str:
        """What is on the wire."""
        return "none"

    @abc.abstractmethod
    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Arrived:
        """Send each row to the ranks of its experts.

        Arguments:
            x: `[T, H]`, contiguous.
            topk_idx: `[T, K]` int64, global expert ids, -1 = no expert.
            topk_weights: `[T, K]` float32, travels with the rows.
        """

    @abc.abstractmethod
    def output_buffer(self, arrived: Arrived) -> Tensor:
        """A tensor of the shape and dtype of `arrived.x` where experts would write their output; values undefined."""

    @abc.abstractmethod
    def combine(self, y: Tensor, arrived: Arrived, topk_weights: Tensor) -> Tensor:
        """Bring the experts' rows home and add them up, weighted at home.

        Arguments:
            y: of the shape of `arrived.x`: the output buffer or the received rows themselves.
            arrived: what the dispatch brought.
            topk_weights: `[T, K]` float32.

        Returns:
            `[T, H]`; a token without routes is zero.
        """

    @property
    def layout(self) -> str:
        """In which layout rows arrive: `expert_major` or `slab`."""
        return "expert_major"

    def traffic(self) -> Traffic | None:
        """Payload that this rank has moved so far between hosts and for them, or `None` where nobody counts it."""
        return None

    def explain(self) -> str:
        """What was chosen and why, in words; empty where there was nothing to choose."""
        return ""

    def memory(self) -> int | None:
        """Most bytes of receive memory that this rank has touched so far, or `None` where that is not known."""
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what the dispatcher holds."""


def dispatcher_class(name: str) -> type[Dispatcher]:
    """Find a dispatcher: a name of `BUILT_IN`, or your own `module:Class`, built as `Class(setup)`.

    Raises:
        ValueError: unknown name, or what was found is no `Dispatcher`.
        ImportError: the module needs a part that is not installed.
    """
    path = BUILT_IN.get(name, name)
    module_name, colon, class_name = path.partition(":")
    if not colon:
        raise ValueError(f"backend {name!r} is unknown; available: {', '.join(sorted(BUILT_IN))}, or module:Class")
    found = getattr(importlib.import_module(module_name), class_name, None)
    if not isinstance(found, type) or not issubclass(found, Dispatcher):
        raise ValueError(f"backend {name!r} is not a subclass of moecomm.bench.dispatchers.Dispatcher")
    return found
