"""moecomm itself as one of the dispatchers of the benchmark."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, final

import torch
from torch import Tensor

import moecomm
from moecomm.bench.dispatchers import Arrived, Dispatcher, Setup
from moecomm.bench.traffic import Traffic

__all__ = [
    "DirectDispatcher",
    "HierarchicalDispatcher",
    "MoecommDispatcher",
    "PerHostDispatcher",
    "ThroughputDispatcher",
]


class _OurDispatcher(Dispatcher):
    """`Communicator.dispatch` in the layout of its mode, `Communicator.combine` with the weights applied at home.

    Arguments:
        setup: what it is built from.
        mode: of the calls.
        algorithm: of the communicator.
        reduce: of the combines.
    """

    is_exact = True

    def __init__(
        self,
        setup: Setup,
        mode: str,
        *,
        algorithm: Literal["auto", "direct", "hierarchical"] = "auto",
        reduce: Literal["exact", "per_host"] = "exact",
    ) -> None:
        config = setup.config
        self._mode = mode
        self._reduce = reduce
        self._codec = config.codec
        self._dtype = getattr(torch, config.dtype)
        self._communicator = moecomm.Communicator(
            setup.process_group,
            num_experts=config.experts,
            hidden=config.hidden,
            num_topk=config.topk,
            max_tokens_per_rank=max(config.tokens),
            transport=config.transport,
            algorithm=algorithm,
            codec=config.codec,
            timeout=timedelta(seconds=min(config.timeout, 100.0)),
            device=setup.device,
        )

    @property
    def transport(self) -> str:
        return self._communicator.transport_name

    @property
    def codec(self) -> str:
        return self._codec

    @property
    def layout(self) -> str:
        return "slab" if self._mode == "low_latency" else "expert_major"

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Arrived:
        return self._communicator.dispatch(x, topk_idx, topk_weights, mode=self._mode)

    def output_buffer(self, arrived: Arrived) -> Tensor:
        assert isinstance(arrived, moecomm.Received)
        return self._communicator.combine_buffer(arrived.handle, self._dtype)

    def combine(self, y: Tensor, arrived: Arrived, topk_weights: Tensor) -> Tensor:
        assert isinstance(arrived, moecomm.Received)
        return self._communicator.combine(y, arrived.handle, topk_weights, reduce=self._reduce)

    def traffic(self) -> Traffic | None:
        stats = self._communicator.stats
        if "bytes_between_hosts" not in stats:
            return None
        return Traffic(sent=stats["bytes_between_hosts"], forwarded=stats["bytes_forwarded"])

    def explain(self) -> str:
        return self._communicator.explain()

    def memory(self) -> int | None:
        return self._communicator.stats.get("receive_bytes_touched")

    def close(self) -> None:
        self._communicator.close()


@final
class MoecommDispatcher(_OurDispatcher):
    """In the mode that is measured."""

    name = "moecomm"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, setup.config.mode)


@final
class ThroughputDispatcher(_OurDispatcher):
    """In throughput mode, as a competitor of the low-latency mode."""

    name = "throughput"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, "throughput")


@final
class DirectDispatcher(_OurDispatcher):
    """From rank to rank, also between hosts."""

    name = "direct"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, setup.config.mode, algorithm="direct")


@final
class HierarchicalDispatcher(_OurDispatcher):
    """Over rails between hosts, whether that moves fewer bytes or not."""

    name = "hierarchical"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, setup.config.mode, algorithm="hierarchical")


@final
class PerHostDispatcher(_OurDispatcher):
    """As moecomm chooses, with each token's rows summed per host on their way home."""

    name = "per_host"
    sums_per_host = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, setup.config.mode, reduce="per_host")
