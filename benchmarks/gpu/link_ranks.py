"""What each process of an exchange between processes does: ours, the frameworks' way, and the copy of their bytes.

In turn, in the same group, by the host's clock: a barrier, the call, the device waited for. So launches are included,
as in a training step, which has to wait for counts anyway.

T tokens of a rank   K num_topk   H hidden   E experts
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from answers import wrong_bits
from link_copies import LinkCopies
from torch import Tensor

from moecomm.bench.all_to_all import AllToAllDispatcher
from moecomm.bench.barrier import SpinBarrier
from moecomm.bench.check import wrong_in_combine, wrong_in_dispatch
from moecomm.bench.config import BenchConfig
from moecomm.bench.dispatchers import Arrived, Dispatcher, Setup
from moecomm.bench.ours import MoecommDispatcher
from moecomm.bench.workload import Inputs, Workload
from moecomm.devices.base import AsynchronousDevice, Device
from moecomm.devices.registry import find_device
from moecomm.groups import TorchGroup
from moecomm.placement import Placement
from moecomm.testing import uniform

__all__ = ["COPY", "OURS", "THEIRS", "Found", "Job", "measure", "on_gpu", "on_host"]

OURS, THEIRS, COPY = "ours", "theirs", "copy"
_WARM = 2
_LEAST, _MOST = 5, 50  # repetitions
_CHECKED_TOKENS = 1024  # the oracle is the host's work


@dataclass(frozen=True)
class Job:
    """What all ranks are told.

    Attributes:
        config: sizes, mode and transport; one number of tokens.
        device_of: gives what `Communicator` takes, by rank; called first of all.
        collective: backend of the group of the frameworks' way; None = it does not take part.
        seconds: for the timed repetitions.
        folder: of this job alone.
    """

    config: BenchConfig
    device_of: Callable[[int], Any]
    collective: str | None
    seconds: float
    folder: str


@dataclass
class Found:
    """What one rank has found.

    Attributes:
        times_us: by who and operation, one per repetition; the copy has none but "dispatch", which serves both.
        wrong: by who and operation, elements.
        bytes_away, bytes_here: of the rows that go to other ranks, and to this one.
        transport: of our communicator.
    """

    times_us: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    wrong: dict[tuple[str, str], int] = field(default_factory=dict)
    bytes_away: int = 0
    bytes_here: int = 0
    transport: str = ""


def on_gpu(devices: Sequence[int], rank: int) -> torch.device:
    """Takes this rank's GPU for the process."""
    torch.cuda.set_device(devices[rank])
    return torch.device("cuda", devices[rank])


def on_host(rank: int) -> None:
    """CPU tensors, to rehearse."""


class _Collective(AllToAllDispatcher):
    """Sort, gather, exchange the counts, exchange the rows; and back: over `all_to_all_single`."""

    name = "all_to_all_single"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._group = setup.process_group

    @property
    def transport(self) -> str:
        return str(dist.get_backend(self._group))

    def exchange(
        self, output: Tensor, source: Tensor, output_splits: Sequence[int], source_splits: Sequence[int]
    ) -> None:
        dist.all_to_all_single(output, source, list(output_splits), list(source_splits), group=self._group)


def measure(group: TorchGroup, job: Job) -> Found:
    """Measures one rank; all call it together."""
    config = job.config
    device = find_device(job.device_of(group.rank))
    found = Found()
    dispatchers: dict[str, Dispatcher] = {}
    copies: LinkCopies | None = None
    barrier = SpinBarrier(Path(job.folder) / "barrier", rank=group.rank, num_ranks=group.size, timeout=config.timeout)
    try:
        ours = MoecommDispatcher(Setup(config, group.process_group, group.rank, device))
        dispatchers[OURS], found.transport = ours, ours.transport
        if job.collective is not None:
            dispatchers[THEIRS] = _Collective(Setup(config, _collective_group(job), group.rank))
        inputs = _inputs(config, group.rank, device.torch_device)
        bytes_to = _bytes_to(config, inputs)
        found.bytes_here = bytes_to[group.rank]
        found.bytes_away = sum(bytes_to) - found.bytes_here
        if isinstance(device, AsynchronousDevice):
            copies = LinkCopies(device, group, bytes_to)
        race = _Race(dispatchers, copies, inputs, device, barrier)
        race.run(lambda mine: group.all_gather(mine)[0], job.seconds)
        found.times_us, found.wrong = race.times_us, race.wrong
        if copies is not None:
            found.wrong[COPY, "dispatch"] = copies.check()
        _check(found, config, dispatchers, group.rank, device.torch_device)
    finally:
        for dispatcher in dispatchers.values():
            dispatcher.close()
        barrier.close()
    if copies is not None:
        copies.close()
    return found


def _collective_group(job: Job) -> dist.ProcessGroup:
    timeout = timedelta(seconds=job.config.timeout)
    made: dist.ProcessGroup = dist.new_group(backend=job.collective, timeout=timeout)
    return made


def _inputs(config: BenchConfig, rank: int, device: torch.device) -> Inputs:
    """Random rows and choices; weights are powers of two, so that sums have the same bits in any order."""
    (tokens,) = config.tokens
    generator = torch.Generator(device).manual_seed(config.seed + rank)
    x = torch.empty(tokens, config.hidden, dtype=getattr(torch, config.dtype), device=device)
    ids = uniform(tokens, config.experts, config.topk, seed=config.seed + rank)
    weights = torch.exp2(-1.0 - torch.arange(config.topk)).expand(tokens, -1).contiguous()
    return Inputs(x.normal_(generator=generator), ids.to(device), weights.to(device))


def _bytes_to(config: BenchConfig, inputs: Inputs) -> list[int]:
    """By rank, bytes of the rows that go there: one per route."""
    expert_rank = Placement(config.experts, config.ranks).expert_rank.to(torch.int64)
    ranks = expert_rank[inputs.topk_idx.cpu().flatten()]
    return [int(count) * config.row_bytes for count in torch.bincount(ranks, minlength=config.ranks)]


class _Race:
    """All contestants in turn, round by round."""

    def __init__(
        self,
        dispatchers: dict[str, Dispatcher],
        copies: LinkCopies | None,
        inputs: Inputs,
        device: Device,
        barrier: SpinBarrier,
    ) -> None:
        self.times_us: dict[tuple[str, str], list[float]] = {}
        self.wrong: dict[tuple[str, str], int] = {}
        self._dispatchers, self._copies, self._inputs = dispatchers, copies, inputs
        self._device, self._barrier = device, barrier
        # Exact: as many bits as rows and weights have together fit into a float32.
        self._sums = (inputs.x.float() * inputs.topk_weights.sum(1, keepdim=True)).to(inputs.x.dtype)

    def run(self, agreed: Callable[[int], int], seconds: float) -> None:
        """Untimed rounds, one to see how long a round takes, and as many as fit into the time, on all ranks alike."""
        for _ in range(_WARM):
            self._round()
        begin = time.perf_counter()
        self._round()
        fitting = int(seconds / max(1e-6, time.perf_counter() - begin))
        self.times_us.clear()
        for _ in range(agreed(min(_MOST, max(_LEAST, fitting)))):
            self._round()

    def _round(self) -> None:
        x, ids, weights = self._inputs.x, self._inputs.topk_idx, self._inputs.topk_weights
        for who, dispatcher in self._dispatchers.items():
            arrived = self._timed(who, "dispatch", lambda d=dispatcher: d.dispatch(x, ids, weights))
            home = self._timed(who, "combine", lambda d=dispatcher, a=arrived: d.combine(a.x, a, weights))
            self.wrong[who, "combine"] = self.wrong.get((who, "combine"), 0) + wrong_bits(home, self._sums)
            del arrived, home
        if self._copies is not None:
            self._timed(COPY, "dispatch", self._copies.run)

    def _timed(self, who: str, what: str, step: Callable[[], Any]) -> Any:
        self._settle()
        self._barrier.wait()
        begin = time.perf_counter()
        result = step()
        self._settle()
        self.times_us.setdefault((who, what), []).append(1e6 * (time.perf_counter() - begin))
        return result

    def _settle(self) -> None:
        if isinstance(self._device, AsynchronousDevice):
            self._device.current_stream().synchronize()


@dataclass(frozen=True)
class _Brought:
    """What a dispatch has brought, on the host."""

    x: Tensor
    topk_weights: Tensor | None
    num_tokens_per_expert: Tensor


def _check(
    found: Found, config: BenchConfig, dispatchers: dict[str, Dispatcher], rank: int, device: torch.device
) -> None:
    """Other rows than those that were timed, held to the oracle: what is left of earlier calls does not pass."""
    workload = Workload(config, min(_CHECKED_TOKENS, *config.tokens), rank, check=True)
    x, ids, weights = (
        tensor.to(device) for tensor in (workload.inputs.x, workload.inputs.topk_idx, workload.inputs.topk_weights)
    )
    for who, dispatcher in dispatchers.items():
        arrived = dispatcher.dispatch(x, ids, weights)
        home = dispatcher.combine(arrived.x, arrived, weights).cpu()
        found.wrong[who, "dispatch"] = wrong_in_dispatch(workload, _at_home(arrived))
        found.wrong[who, "combine"] += wrong_in_combine(workload, home, scaled=False, exact=dispatcher.is_exact)


def _at_home(arrived: Arrived) -> _Brought:
    weights = arrived.topk_weights
    return _Brought(arrived.x.cpu(), None if weights is None else weights.cpu(), arrived.num_tokens_per_expert.cpu())
