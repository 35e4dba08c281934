"""The contracts of the exchange: an algorithm begins a dispatch or a combine; the session, which all algorithms of a
communicator share, carries the calls to their end, in order.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from moecomm.algorithms.calls import Call
from moecomm.algorithms.hops import Hops
from moecomm.algorithms.routing import Routing
from moecomm.algorithms.signature import Operation
from moecomm.codecs.base import RowFormat
from moecomm.devices.base import Device
from moecomm.kernels.base import RowKernels
from moecomm.placement import Placement
from moecomm.topology import Topology

__all__ = ["Algorithm", "Arrival", "Returned", "Session"]


class Arrival(NamedTuple):
    """What a dispatch brought.

    Attributes:
        x: `[N, H]` rows; slab: or `[E_local, capacity, H]`.
        topk_weights: `[N]` (expert_major), `[N, K]` (flat) float32 (float64), or None if none travelled; slab: or
            `[E_local, capacity]`.
        topk_idx: `[N, K]` int32 local ids (flat) or None.
        num_tokens_per_expert: `[E_local]` int32, without padding.
        offsets: `[E_local]` int32, inclusive prefix sums, padded; slab: None; flat: or None.
        routing: complete.
    """

    x: torch.Tensor
    topk_weights: torch.Tensor | None
    topk_idx: torch.Tensor | None
    num_tokens_per_expert: torch.Tensor
    offsets: torch.Tensor | None
    routing: Routing

    def flat(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows `[N, H]` and weights `[N]` (flat: `[N, K]`), whatever the layout."""
        x, weights = self.x, self.topk_weights
        if x.dim() == 2:
            return x, weights
        return x.flatten(0, 1), None if weights is None else weights.flatten()


class Returned(NamedTuple):
    """What a combine brought home.

    Attributes:
        x: `[T, H]` sums.
        values: `[T, K]` float32: the value of each route, 0 where there is none; None if none were sent.
    """

    x: torch.Tensor
    values: torch.Tensor | None


class Algorithm(abc.ABC):
    """A way to exchange rows between the ranks of a communicator. Calls are collective, in one order everywhere.

    Attributes:
        refusal: why all its dispatches are refused, as a sentence without its full stop; mostly empty.
    """

    name: ClassVar[str]
    refusal: str = ""

    @abc.abstractmethod
    def check_size(self, num_tokens: int) -> None:
        """Raises ValueError if a dispatch cannot have so many tokens."""

    def check_rows(self, layout: str, capacity: int, row_format: RowFormat) -> None:  # noqa: B027 - most take any
        """Raises ValueError if the rows of a dispatch of this shape, or of its combine, take more than there is."""

    def is_by_device(self, routing: Routing | None, *, is_hosted: bool, recording: bool, is_fixed: bool) -> bool:
        """Whether only the devices count a call, and hosts say nothing to each other.

        Arguments:
            routing: known for the call; None: a dispatch makes it.
            is_hosted: see `Routing`.
            recording: autograd records it, or it is of such a call's backward and brings values home.
            is_fixed: the dispatch was given a capacity.
        """
        return False

    @abc.abstractmethod
    def capacity(self, layout: str, expert_alignment: int) -> int:
        """Rows of a dispatch of fixed shape: per expert (slab) or in all (expert_major); 0 = as many as arrive."""

    @abc.abstractmethod
    def begin_dispatch(
        self, x: torch.Tensor, routing: Routing, row_format: RowFormat, topk_weights: torch.Tensor | None
    ) -> Call:
        """Begins a dispatch; its result is an `Arrival`. With complete `routing` no counts are exchanged.

        Arguments:
            x: `[T, H]` rows, last dimension contiguous.
            row_format: how rows are written.
            topk_weights: `[T, K]` float32 (float64) contiguous, travelling with the rows, or None.
        """

    @abc.abstractmethod
    def begin_combine(
        self,
        y: torch.Tensor,
        routing: Routing,
        row_format: RowFormat,
        *,
        topk_weights: torch.Tensor | None,
        values: torch.Tensor | None,
        may_change: bool,
        per_host: bool = False,
    ) -> Call:
        """Begins a combine; its result is a `Returned`.

        Arguments:
            y: `[N, H]` contiguous.
            topk_weights: `[T, K]` float32 (float64) contiguous, applied at home, or None.
            values: `[N]` (flat: `[N, K]`) float32 (float64) contiguous, brought home route by route, or None.
            may_change: `y` may be written to as soon as the call is finished here, whatever the peers still read.
            per_host: a token's rows are summed host by host; where there is one host, that is the same.
        """


class Session(abc.ABC):
    """What the algorithms of one communicator share: the calls in flight, their order, receive memory, the goodbye.

    Attributes:
        algorithms: by mode.
        topology: where the ranks are.
        hops: what crosses between domains; None: nobody counts.
        refusals: transports that were asked before the one in use, and why they were not taken.
        device: where tensors are.
        kernels: of the device.
        tokens_per_expert: `[E_local]` int64: routes that arrived for each local expert, over all dispatches so far.
        num_crossings: R * 2 * D if calls of devices need to know how many tokens of whom go to which domain, and how
            many rows come back; else 0.
    """

    algorithms: Mapping[str, Algorithm]
    topology: Topology
    hops: Hops | None = None
    refusals: Mapping[str, str] = MappingProxyType({})
    device: Device
    kernels: RowKernels
    tokens_per_expert: torch.Tensor
    num_crossings = 0

    def count_tokens(self, num_tokens_per_expert: npt.NDArray[np.int32]) -> None:
        """Adds what a dispatch brought, `[E_local]`, to the cumulative counts."""
        counts = self.tokens_per_expert.numpy()  # the same memory
        counts += num_tokens_per_expert

    def count_routes(self, topk_idx: torch.Tensor, placement: Placement, counts: torch.Tensor) -> int:
        """`RowKernels.count_routes` of ids on the device; `counts` is on the host."""
        return self.kernels.count_routes(topk_idx, placement.expert_rank, placement.num_ranks, counts)

    def arrived_tokens(self) -> torch.Tensor:
        """`tokens_per_expert` with what only the device has counted; waits for that."""
        return self.tokens_per_expert

    def check(self) -> None:  # noqa: B027 - where the host does the work there is nothing to wait for
        """Waits for the device and raises what has gone wrong there."""

    def describe_wires(self) -> list[str]:
        """See `Transport.describe_wires`."""
        return []

    @abc.abstractmethod
    def waiting_times(self) -> tuple[list[float], list[float]]:
        """Seconds that waits have waited for each rank: in all, and at most in one wait."""

    @abc.abstractmethod
    def refuse(self, operation: Operation, error: Exception) -> None:
        """Counts a call that this rank's arguments do not allow, and tells the peers, who would wait for it."""

    def refuse_by_device(self, operation: Operation, error: Exception) -> None:  # noqa: B027 - most have none of these
        """`refuse` for a call that only the devices would count."""

    @abc.abstractmethod
    def check_room(self, operation: Operation) -> None:
        """Raises TooManyInFlight if one more call may not begin; the peers, which made the same calls, raise it too."""

    @abc.abstractmethod
    def make_room(self) -> None:
        """Finishes the oldest calls until one more may begin."""

    @abc.abstractmethod
    def finish(self, call: Call) -> Any:
        """Carries the call (and those begun before it) to its end; gives its result or raises its error."""

    @abc.abstractmethod
    def step(self, call: Call) -> None:
        """Runs one more phase of the oldest unfinished call up to this one; waits if the phase has to."""

    @abc.abstractmethod
    def poll(self, call: Call) -> bool:
        """Runs what needs no waiting; True once the call is finished."""

    @abc.abstractmethod
    def expose(self, num_rows: int, row_format: RowFormat, *, is_fixed: bool) -> torch.Tensor:
        """An uninitialised `[num_rows, H]` tensor in memory that peers can read, so that combine copies nothing.

        Arguments:
            num_rows: N.
            row_format: of the rows.
            is_fixed: the shape is fixed and the block mostly empty.

        Raises:
            MemoryLimitExceeded: if there is no memory for it.
        """

    @abc.abstractmethod
    def distrust(self, x: torch.Tensor) -> None:
        """Says that the rows that a dispatch has brought may be written to without torch counting it."""

    @abc.abstractmethod
    def statistics(self) -> dict[str, int]:
        """Counters for tests and for `Communicator.stats`."""

    @abc.abstractmethod
    def trim(self) -> int:
        """Gives unused receive memory back to the system; returns the bytes."""

    @abc.abstractmethod
    def close(self) -> None:
        """Says goodbye; idempotent, needs no peer."""
