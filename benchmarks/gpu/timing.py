"""Time on the device: events around a step, a cold cache before it, the host far enough ahead of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from moecomm.bench.statistics import percentile

__all__ = ["Timer", "Timing"]

_LEAST, _MOST = 7, 200  # repetitions
_SPIN_CYCLES = 20_000_000
_SLACK_US = 30.0


@dataclass(frozen=True)
class Timing:
    """Of one step, in microseconds, over `repetitions`."""

    median_us: float
    p90_us: float
    repetitions: int

    @classmethod
    def of(cls, times_us: Sequence[float]) -> Timing:
        return cls(median(times_us), percentile(times_us, 90), len(times_us))


class Timer:
    """Measures steps on one device.

    Arguments:
        device: a GPU; or the CPU, to rehearse: then a step runs once, by the host's clock, which says nothing about any
            GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_gpu = device.type == "cuda"
        self._streams: list[torch.cuda.Stream] = []
        self._copy: dict[int, Timing] = {}
        if self.is_gpu:
            cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            self._flush = torch.empty(max(1 << 26, 4 * cache_bytes), dtype=torch.uint8, device=device)
            _spin(_SPIN_CYCLES)  # the first one loads the code
            self._cycles_per_us = _SPIN_CYCLES / self._elapsed_us(lambda: _spin(_SPIN_CYCLES))

    def measure(self, step: Callable[[], object], *, seconds: float, waits: bool = False) -> Timing:
        """Times a step on the current stream: 2 untimed runs, then as many as fit, at least 7 and at most 200.

        Before each run a buffer larger than the L2 cache is written, and the device spins for as long as the host needs
        to issue the step, so that no time of the host is measured.

        Arguments:
            step: issues the work; joins what it forks.
            seconds: for all runs.
            waits: the step itself waits for the device: the host's time is part of it, and the device does not spin.
        """
        if not self.is_gpu:
            return Timing.of([_clocked(step) * 1e6])
        step()
        step()
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        step()
        host = time.perf_counter() - begin
        torch.cuda.synchronize(self.device)
        whole = time.perf_counter() - begin
        spin_us = 0.0 if waits else 1.5 * host * 1e6 + _SLACK_US
        repetitions = int(min(_MOST, max(_LEAST, seconds / (whole + spin_us * 1e-6 + 1e-4))))
        events = [(_event(), _event()) for _ in range(repetitions)]
        for first, last in events:
            self._flush.fill_(1)
            if spin_us:
                _spin(int(spin_us * self._cycles_per_us))
            first.record()
            step()
            last.record()
        torch.cuda.synchronize(self.device)
        return Timing.of([first.elapsed_time(last) * 1e3 for first, last in events])

    def copy(self, num_bytes: int, *, seconds: float) -> Timing:
        """A device-to-device copy that reads and writes `num_bytes` together."""
        if num_bytes not in self._copy:
            source = torch.zeros(max(1, num_bytes // 2), dtype=torch.uint8, device=self.device)
            target = torch.empty_like(source)
            self._copy[num_bytes] = self.measure(lambda: target.copy_(source), seconds=seconds)
        return self._copy[num_bytes]

    def on_streams(self, phases: Sequence[Callable[[int], object]], num_ranks: int) -> None:
        """Runs each phase for all ranks, a stream each, after what the current stream has; that then waits for all.

        The host issues phase by phase, so a wait on the device may depend on earlier phases of any rank.
        """
        if not self.is_gpu:
            for phase in phases:
                for rank in range(num_ranks):
                    phase(rank)
            return
        while len(self._streams) < num_ranks:
            self._streams.append(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self.device)
        start = current.record_event()
        streams = self._streams[:num_ranks]
        for stream in streams:
            stream.wait_event(start)
        for phase in phases:
            for rank, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    phase(rank)
        for stream in streams:
            current.wait_event(stream.record_event())

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def _elapsed_us(self, step: Callable[[], object]) -> float:
        first, last = _event(), _event()
        first.record()
        step()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _spin(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _clocked(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin
