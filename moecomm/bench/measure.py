"""The measuring loop of one case on one rank.

    turn:   for each backend:   `burst` times   barrier, dispatch and combine of what came   -> dispatch and pair
                                `burst` times   barrier, combine of an output buffer         -> combine
            then, as often, the memory bound
            low latency: then, as often, a signal around the ranks, and an idle loop as long as a pair
            several hosts: then, as often, plain streams and plain puts of the rows that must cross
            rank 0 says whether there is another turn

So backends alternate and whatever else the machine does hits all alike. A barrier stands before each timed part and is
not in it. A repetition of small cases takes microseconds, so a turn then holds several. Between hosts bytes are counted
before the timed part.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from moecomm.bench.barrier import Barrier
from moecomm.bench.bound import MemoryBound
from moecomm.bench.check import wrong_in_combine, wrong_in_dispatch
from moecomm.bench.config import BenchConfig
from moecomm.bench.dispatchers import Arrived, Dispatcher
from moecomm.bench.floor import SignalRing, spin
from moecomm.bench.links import HOP, Link, RailHop
from moecomm.bench.traffic import count_traffic
from moecomm.bench.workload import Workload

__all__ = ["BOUND", "IDLE", "OPS", "SIGNAL", "CaseTimes", "Measurement"]

OPS = ("dispatch", "combine", "pair")
# The name under which times of the memory bound are kept.
BOUND = "bound"
# The same of one-way signals and of the idle loop; see floor.py.
SIGNAL = "signal"
IDLE = "idle"
# The idle loop lasts as long as the median of so many pairs.
IDLE_LIKE = 64

# A turn repeats a backend until it has taken about this long, so that small cases run in a steady state.
TURN_SECONDS = {"throughput": 0.002, "low_latency": 0.01}
MAX_BURST = {"throughput": 16, "low_latency": 64}
# Untimed repetitions per warm-up turn: what takes microseconds when warm takes a millisecond the first time.
WARM_UP_BURST = {"throughput": 1, "low_latency": 16}
# Timed iterations even when the time budget is spent after fewer.
MIN_ITERATIONS = 3


@dataclass
class CaseTimes:
    """What one rank found in one case.

    Arguments:
        nanoseconds: backend -> op -> one time per iteration; the bound under the name `bound`, and in
            low-latency mode signals (op `one_way`) under `signal` and the idle loop (op `pair`) under `idle`; between
            hosts what links take (op `rails`) under `stream` and `hop`, see links.py.
        wrong: backend -> op -> wrong elements in the checked iterations; empty without check.
        memory: backend -> most bytes of receive memory touched, where known.
        traffic: backend -> op -> bytes that left the host; see traffic.py; empty on one host.
    """

    nanoseconds: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    wrong: dict[str, dict[str, int]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    traffic: dict[str, dict[str, dict[str, int | None]]] = field(default_factory=dict)


@final
class Measurement:
    """Measures one case; all ranks build it and call `run` together.

    Arguments:
        config: the run.
        workload: inputs and expected answers of this case.
        dispatchers: who takes part, in the order of the turns, the same on every rank.
        barrier: over all ranks.
        agree: gives rank 0's value to all ranks.
        ring: measures signals; None where there are none.
        links: what is measured of the link between hosts, by name.
        progress: called on every rank with the share of this case's timed part that is done, from 0 to 1, and what is
            being done.
    """

    def __init__(
        self,
        config: BenchConfig,
        workload: Workload,
        *,
        dispatchers: Sequence[Dispatcher],
        barrier: Barrier,
        agree: Callable[[float], float],
        progress: Callable[[float, str], None],
        ring: SignalRing | None = None,
        links: Mapping[str, Link] | None = None,
    ) -> None:
        self._ring = ring
        self._links = dict(links or {})
        self._config = config
        self._workload = workload
        self._dispatchers = tuple(dispatchers)
        self._barrier = barrier
        self._agree = agree
        self._progress = progress
        self._bound = MemoryBound(workload) if config.bound else None
        self._num_rows: list[int] = workload.num_tokens_per_expert.tolist()
        self.times = CaseTimes()

    def run(self) -> CaseTimes:
        """Check, warm up, measure, check again."""
        self._progress(0.0, "checking answers")
        for dispatcher in self._dispatchers:
            self.times.nanoseconds[dispatcher.name] = {op: [] for op in OPS}
            if self._config.check:
                self.times.wrong[dispatcher.name] = dict.fromkeys(OPS, 0)
                self._check(dispatcher)
        if self._bound is not None:
            self.times.nanoseconds[BOUND] = {"dispatch": [], "combine": []}
        if self._ring is not None:
            self.times.nanoseconds[SIGNAL] = {"one_way": []}
        if self._config.mode == "low_latency":
            self.times.nanoseconds[IDLE] = {"pair": []}
        self._check_links()
        if self._config.topology.num_hosts > 1:
            self._progress(0.0, "counting bytes")
            for dispatcher in self._dispatchers:
                self.times.traffic[dispatcher.name] = self._count(dispatcher)
        self._progress(0.0, "warming up")
        burst = self._warm_up()
        self._measure(burst)
        for dispatcher in self._dispatchers:
            memory = dispatcher.memory()
            if memory is not None:
                self.times.memory[dispatcher.name] = memory
        if self._config.check:
            self._progress(1.0, "checking answers again")
            for dispatcher in self._dispatchers:
                self._check(dispatcher)
        return self.times

    def _check_links(self) -> None:
        """Carries the rows that must cross once, untimed; what plain puts brought must be what was sent."""
        for name, link in self._links.items():
            self.times.nanoseconds[name] = {"rails": []}
            self._barrier.wait()
            link.run()
        hop = self._links.get(HOP)
        if isinstance(hop, RailHop):
            wrong = hop.wrong_bytes()
            assert wrong == 0, f"plain puts brought {wrong} wrong bytes"

    def _count(self, dispatcher: Dispatcher) -> dict[str, dict[str, int | None]]:
        inputs = self._workload.inputs
        arrived: list[Arrived] = []

        def dispatch() -> None:
            arrived.append(dispatcher.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights))

        def combine() -> None:
            dispatcher.combine(arrived[0].x, arrived[0], inputs.topk_weights)

        operations = {"dispatch": dispatch, "combine": combine}
        return {op: count_traffic(call, self._barrier, dispatcher.traffic) for op, call in operations.items()}

    def _warm_up(self) -> int:
        """Untimed turns; returns how many repetitions a turn holds, the same on every rank."""
        mode = self._config.mode
        fastest = float("inf")
        for _ in range(max(1, self._config.warmup)):
            for dispatcher in self._dispatchers:
                for _ in range(WARM_UP_BURST[mode]):
                    self._barrier.wait()
                    started = time.perf_counter()
                    self._repeat(dispatcher, {op: [] for op in OPS}, 1)
                    fastest = min(fastest, time.perf_counter() - started)
            self._repeat_bound({op: [] for op in OPS})
        return int(self._agree(max(1, min(MAX_BURST[mode], TURN_SECONDS[mode] // max(fastest, 1e-9)))))

    def _measure(self, burst: int) -> None:
        config = self._config
        limit = config.iterations
        budget = config.seconds / len(config.tokens)
        gc.collect()
        gc.disable()
        try:
            started = time.monotonic()
            iterations = 0
            while True:
                repetitions = burst if limit is None else min(burst, limit - iterations)
                for dispatcher in self._dispatchers:
                    self._repeat(dispatcher, self.times.nanoseconds[dispatcher.name], repetitions)
                for _ in range(repetitions):
                    self._repeat_bound(self.times.nanoseconds.get(BOUND, {}))
                self._repeat_floor(repetitions)
                self._repeat_links(repetitions)
                iterations += repetitions
                spent = time.monotonic() - started
                enough = iterations >= (limit if limit is not None else MIN_ITERATIONS)
                # One more turn like those so far would pass the budget.
                over = spent * (iterations + repetitions) / iterations > budget and iterations >= MIN_ITERATIONS
                done = over or (limit is not None and enough)
                expected = max(budget, spent / iterations * MIN_ITERATIONS)
                self._progress(max(spent / expected, iterations / limit if limit else 0.0), "measuring")
                if self._agree(float(done)):
                    return
        finally:
            gc.enable()

    def _repeat(self, dispatcher: Dispatcher, into: dict[str, list[int]], repetitions: int) -> None:
        inputs = self._workload.inputs
        x, topk_idx, weights = inputs.x, inputs.topk_idx, inputs.topk_weights
        clock = time.perf_counter_ns
        arrived: Arrived | None = None
        result: Tensor | None = None
        for _ in range(repetitions):
            arrived = result = None  # freed here, outside the timed part
            self._barrier.wait()
            t0 = clock()
            arrived = dispatcher.dispatch(x, topk_idx, weights)
            t1 = clock()
            result = dispatcher.combine(arrived.x, arrived, weights)
            t2 = clock()
            into["dispatch"].append(t1 - t0)
            into["pair"].append(t2 - t0)
        assert arrived is not None
        y = dispatcher.output_buffer(arrived)
        self._copy_rows(arrived.x, y)
        for _ in range(repetitions):
            result = None
            self._barrier.wait()
            t0 = clock()
            result = dispatcher.combine(y, arrived, weights)
            into["combine"].append(clock() - t0)
        del result

    def _repeat_bound(self, into: dict[str, list[int]]) -> None:
        if self._bound is None:
            return
        for op, move in (("dispatch", self._bound.dispatch), ("combine", self._bound.combine)):
            self._barrier.wait()
            started = time.perf_counter_ns()
            move()
            into[op].append(time.perf_counter_ns() - started)

    def _repeat_floor(self, repetitions: int) -> None:
        if self._ring is not None:
            into = self.times.nanoseconds[SIGNAL]["one_way"]
            for _ in range(repetitions):
                self._barrier.wait()
                into.append(self._ring.one_way())
        idle = self.times.nanoseconds.get(IDLE)
        if idle is not None:
            pairs = self.times.nanoseconds[self._dispatchers[0].name]["pair"]
            period = statistics.median(pairs[-IDLE_LIKE:])
            for _ in range(repetitions):
                self._barrier.wait()
                idle["pair"].append(spin(period))

    def _repeat_links(self, repetitions: int) -> None:
        for name, link in self._links.items():
            for _ in range(repetitions):
                self._barrier.wait()
                self.times.nanoseconds[name]["rails"].append(link.run())

    def _copy_rows(self, x: Tensor, y: Tensor) -> None:
        """Copies the rows that arrived; of slabs, which are mostly empty, those alone, as experts would write them."""
        if x.dim() == 2:
            y.copy_(x)
            return
        for expert, count in enumerate(self._num_rows):
            if count:
                y[expert, :count].copy_(x[expert, :count])

    def _check(self, dispatcher: Dispatcher) -> None:
        inputs = self._workload.inputs
        how = {"exact": dispatcher.is_exact, "per_host": dispatcher.sums_per_host}
        wrong = self.times.wrong[dispatcher.name]
        arrived = dispatcher.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
        wrong["dispatch"] += wrong_in_dispatch(self._workload, arrived)
        y = self._experts(dispatcher, arrived)
        combined = dispatcher.combine(arrived.x, arrived, inputs.topk_weights)
        wrong["pair"] += wrong_in_combine(self._workload, combined, scaled=False, **how)
        combined = dispatcher.combine(y, arrived, inputs.topk_weights)
        wrong["combine"] += wrong_in_combine(self._workload, combined, scaled=True, **how)

    def _experts(self, dispatcher: Dispatcher, arrived: Arrived) -> Tensor:
        """What the benchmark's experts make of the rows; of rows that did not come as they must, the rows."""
        y = dispatcher.output_buffer(arrived)
        scale = self._workload.slab_scale() if dispatcher.layout == "slab" else self._workload.row_scale()
        if arrived.x.shape[:1] == scale.shape[:1]:
            torch.mul(arrived.x, scale, out=y)
        else:
            y.copy_(arrived.x)
        return y
