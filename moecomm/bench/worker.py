"""One rank of a benchmark run: `python -m moecomm.bench.worker DIRECTORY [RANK]`, started by `moecomm.bench.launch`.

In DIRECTORY it finds `config.json`; it leaves there `result-RANK.json`, or `error-RANK.txt` with a traceback, and rank
0 keeps `progress.txt` (a number from 0 to 1 and a text) up to date. Without RANK it asks the environment of mpirun.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moecomm.bench.barrier import Barrier, SpinBarrier
from moecomm.bench.config import BenchConfig
from moecomm.bench.dispatchers import Dispatcher, Setup, dispatcher_class
from moecomm.bench.floor import SignalRing, make_signal_ring, measure_python
from moecomm.bench.links import make_links
from moecomm.bench.measure import Measurement
from moecomm.bench.workload import Workload
from moecomm.errors import TransportUnavailable
from moecomm.groups import as_group

__all__ = ["Place", "main", "measure_rank"]

MPI_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


def main(arguments: list[str]) -> int:
    """Run one rank; returns the exit status."""
    directory = Path(arguments[0])
    rank = int(arguments[1]) if len(arguments) > 1 else _mpi_rank()
    try:
        config = BenchConfig.from_dict(json.loads((directory / "config.json").read_text()))
        result = _run(config, directory, rank)
        # A gloo group that is still alive when the interpreter ends aborts the process: nothing may hold it any more.
        gc.collect()
        _write(directory / f"result-{rank}.json", json.dumps(result))
    except TransportUnavailable as error:  # says all there is to know
        _write(directory / f"error-{rank}.txt", str(error))
        return 1
    except BaseException:  # noqa: BLE001  whatever it is, the parent must see it
        _write(directory / f"error-{rank}.txt", traceback.format_exc())
        return 1
    return 0


@dataclass(frozen=True)
class Place:
    """Where a rank stands among the others.

    Arguments:
        process_group: of gloo, over all ranks.
        rank: in it.
        barrier: over all ranks.
        address: of this rank's host, where other hosts can reach it; needed where there are several.
    """

    process_group: dist.ProcessGroup
    rank: int
    barrier: Barrier
    address: str = ""


def _run(config: BenchConfig, directory: Path, rank: int) -> dict[str, Any]:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory / 'store'}",
        rank=rank,
        world_size=config.ranks,
        timeout=timedelta(seconds=config.timeout),
    )
    group = dist.group.WORLD
    assert group is not None
    barrier = SpinBarrier(directory / "barrier", rank=rank, num_ranks=config.ranks, timeout=config.timeout)

    def progress(share: float, text: str) -> None:
        if rank == 0:
            _write(directory / "progress.txt", f"{share:.4f} {text}")

    try:
        return measure_rank(config, Place(group, rank, barrier), progress)
    finally:
        barrier.close()
        dist.destroy_process_group()


def measure_rank(config: BenchConfig, place: Place, progress: Callable[[float, str], None]) -> dict[str, Any]:
    """Measure every case of a run; all ranks call this together.

    Arguments:
        config: the run.
        place: which rank this is.
        progress: called with the share of the run that is done, from 0 to 1, and a text.

    Returns:
        What this rank found, as values that JSON can hold; `make_records` takes those of all ranks.
    """
    torch.set_num_threads(config.torch_threads)
    group = as_group(place.process_group)
    dispatchers: list[Dispatcher] = []
    ring: SignalRing | None = None
    flag = torch.zeros(1, dtype=torch.float64)

    def agree(value: float) -> float:
        flag.fill_(value)
        dist.broadcast(flag, 0, group=place.process_group)
        return float(flag)

    cases = []
    try:
        for name in config.backends:
            dispatchers.append(dispatcher_class(name)(Setup(config, place.process_group, place.rank)))
        ring = make_signal_ring(config, group)
        python = measure_python(config) if config.mode == "low_latency" else {}
        for index, num_tokens in enumerate(config.tokens):

            def tell(done: float, what: str, *, index: int = index, num_tokens: int = num_tokens) -> None:
                share = (index + min(done, 1.0)) / len(config.tokens)
                progress(share, f"bench, {num_tokens} tokens per rank, {what}")

            workload = Workload(config, num_tokens, place.rank, check=config.check)
            links = make_links(config, group, workload.payload, address=place.address)
            try:
                measurement = Measurement(
                    config,
                    workload,
                    dispatchers=dispatchers,
                    barrier=place.barrier,
                    agree=agree,
                    progress=tell,
                    ring=ring,
                    links=links,
                )
                times = measurement.run()
            finally:
                for link in links.values():
                    link.close()
            cases.append({"tokens": num_tokens, "payload": asdict(workload.payload), **asdict(times)})
        return {
            "rank": place.rank,
            "backends": [
                {
                    "name": d.name,
                    "transport": d.transport,
                    "codec": d.codec,
                    "layout": d.layout,
                    "is_exact": d.is_exact,
                    "explanation": d.explain(),
                }
                for d in dispatchers
            ],
            "python": python,
            "cases": cases,
        }
    finally:
        for dispatcher in dispatchers:
            dispatcher.close()
        if ring is not None:
            ring.close()


def _mpi_rank() -> int:
    for variable in MPI_RANK_VARIABLES:
        if variable in os.environ:
            return int(os.environ[variable])
    raise ValueError(f"no rank was given and none of {', '.join(MPI_RANK_VARIABLES)} is set")


def _write(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or nothing."""
    temporary = path.with_suffix(".part")
    temporary.write_text(text)
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
