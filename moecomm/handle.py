"""The routing decision of one dispatch, and what a dispatch gives."""

from __future__ import annotations

import dataclasses

import torch

from moecomm.algorithms.plan import Layout
from moecomm.algorithms.routing import Routing

__all__ = ["Handle", "Received", "received_of", "rows_of"]


@dataclasses.dataclass(frozen=True, eq=False)
class Handle:
    """Where the rows of one routing decision go: routing only, no payload and no transport. Reusable.

    T tokens on this rank, K top-k, E experts, R ranks, N rows received here.

    Arguments:
        routing: complete.
        num_rows: N, padding included.
        communicator: id of the communicator that made it.
    """

    routing: Routing
    num_rows: int
    communicator: int

    @property
    def routes(self) -> torch.Tensor:
        """`[T, K]` int64: rank << 40 | row there, in the order in which combine sums; -1 = nothing."""
        assert self.routing.routes is not None
        return self.routing.routes

    @property
    def topk_idx(self) -> torch.Tensor:
        """`[T, K]` int32: global expert ids, -1 = no expert."""
        return self.routing.topk_idx

    def __repr__(self) -> str:
        fixed = f", capacity={self.capacity}" if self.capacity else ""
        return (
            f"Handle(mode={self.mode!r}, layout={self.layout!r}, num_tokens={self.num_tokens}, "
            f"num_topk={self.topk_idx.shape[1]}, num_rows={self.num_rows}{fixed}, "
            f"expert_alignment={self.expert_alignment}, communicator={self.communicator})"
        )

    @property
    def counts(self) -> torch.Tensor:
        """`[R, E + R]` int32 on the host: per source rank its routes per expert, then its distinct tokens per rank.

        After a dispatch that a device has made alone, to read it is to wait for the device.
        """
        counts = self._known.counts
        assert counts is not None
        return counts

    @property
    def _known(self) -> Routing:
        """The routing with all that the host can know; asked for once."""
        known: Routing | None = self.__dict__.get("_hosted")
        if known is None:
            known = self.__dict__["_hosted"] = self.routing.known_to_host()
        return known

    @property
    def stamp(self) -> torch.Tensor:
        """`[2]` int64 on the host: number of its dispatch, fingerprint of `topk_idx`. The same tensor each time.

        On devices of several domains `[2 + R * 2 * D]`: then, by rank, how many of its tokens have an expert in each
        domain, and how many rows each answers in an exact combine. As for `counts`, the host may have to wait.
        """
        stamp = self.routing.stamp
        if stamp is None:
            stamp = self.__dict__.get("_stamp")
        if stamp is None:
            crossings = () if self.routing.crossings is None else self.routing.crossings.flatten().tolist()
            stamp = torch.tensor((self.routing.origin, self._known.fingerprint, *crossings), dtype=torch.int64)
            self.__dict__["_stamp"] = stamp
        return stamp

    @property
    def is_on_device(self) -> bool:
        """Whether the device alone knows the routing, and finds out by itself whether a recompute has changed it."""
        return self.routing.on_device is not None and self.mode == "throughput"

    @property
    def token(self) -> torch.Tensor:
        """By which a backward knows the forward's routing from that of a recompute. The same tensor each time."""
        return self.topk_idx if self.is_on_device else self.stamp

    @property
    def layout(self) -> Layout:
        """`expert_major`, `flat` or `slab`."""
        return self.routing.layout

    @property
    def expert_alignment(self) -> int:
        """Each local expert's rows are padded to a multiple of it."""
        return self.routing.expert_alignment

    @property
    def capacity(self) -> int:
        """Rows of the fixed shape: per expert (slab), in all (expert_major, flat); 0: as many as arrive."""
        return self.routing.capacity

    @property
    def origin(self) -> int | None:
        """Number of the dispatch that made it, where it is known without reading a tensor; else None."""
        return self.routing.origin

    @property
    def mode(self) -> str:
        """`throughput` or `low_latency`: that of the dispatch, and so of the combine."""
        return self.routing.mode

    @property
    def num_tokens(self) -> int:
        """T: tokens of this rank."""
        return self.routing.topk_idx.shape[0]

    @property
    def num_topk(self) -> int:
        """K."""
        return self.routing.topk_idx.shape[1]


@dataclasses.dataclass(frozen=True, eq=False)
class Received:
    """What a dispatch gives to one rank. Rows beyond the real ones (alignment, capacity) are zero rows of weight 0.

    Attributes:
        x: `[N, H]` (slab: `[E_local, capacity, H]`), dtype of the x sent; a view of receive memory that returns when
            the last tensor on it dies. It may be written to; in low-latency mode by torch only (numpy, `.data` and raw
            pointers are not noticed) where rows beyond the real ones are concerned.
        topk_weights: weights that travelled with the rows, float32 (float64 beside float64 rows). expert_major: `[N]`;
            slab: `[E_local, capacity]`; flat: `[N, K]`, 0 where `topk_idx` is -1. None if none were given.
        topk_idx: flat: `[N, K]` int32 local expert ids, -1 = the expert is elsewhere, or (with a capacity) the row is
            not real. expert_major: None.
        num_tokens_per_expert: `[E_local]` int32: routes that arrived for each local expert, without padding.
        offsets: `[E_local]` int32: inclusive prefix sums of those, each padded to `expert_alignment`: where each
            expert's rows of `x` end; with a capacity and in low-latency mode N may lie beyond the last. flat, slab:
            None.
        handle: for `combine`, and for further dispatches with the same routing.
    """

    x: torch.Tensor
    topk_weights: torch.Tensor | None
    topk_idx: torch.Tensor | None
    num_tokens_per_expert: torch.Tensor
    offsets: torch.Tensor | None
    handle: Handle

    def __repr__(self) -> str:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        looks = ", ".join(f"{name}={_look(tensor)}" for name, tensor in tensors.items())
        return f"Received({looks}, handle={self.handle})"


def _look(tensor: torch.Tensor) -> str:
    """Dtype and shape, and the device if it is not the CPU."""
    where = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{where}"


def received_of(
    x: torch.Tensor,
    topk_weights: torch.Tensor | None,
    topk_idx: torch.Tensor | None,
    num_tokens_per_expert: torch.Tensor,
    offsets: torch.Tensor | None,
    handle: Handle,
) -> Received:
    """What a user gets; rows and weights of slabs may also come as `[N, H]` and `[N]`."""
    routing = handle.routing
    if routing.layout == "slab" and x.dim() == 2:
        x = x.view(-1, routing.capacity, x.shape[1])
        topk_weights = None if topk_weights is None else topk_weights.view(-1, routing.capacity)
    if routing.layout != "expert_major":
        offsets = None
    return Received(x, topk_weights, topk_idx, num_tokens_per_expert, offsets, handle)


def rows_of(y: torch.Tensor, handle: Handle) -> torch.Tensor:
    """`[E_local, capacity, H]` as `[N, H]`; anything else as it is, to be checked."""
    if isinstance(y, torch.Tensor) and y.dim() == 3 and isinstance(handle, Handle) and handle.layout == "slab":
        return y.flatten(0, 1) if y.shape[1] == handle.capacity else y
    return y
