"""A run of the benchmark whose ranks somebody else has started, on one host or many: torchrun, or mpirun.

Every process runs the same command; it is one rank, and rank 0 speaks.
"""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from moecomm.bench.barrier import make_barrier
from moecomm.bench.config import BenchConfig
from moecomm.bench.links import own_address
from moecomm.bench.worker import Place, measure_rank
from moecomm.groups import as_group
from moecomm.transports.peers import gather_peers

__all__ = ["Launched", "hosts_of", "launched_as", "run_launched"]

_MEETING = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launched:
    """Which rank this process is, as its launcher says.

    Attributes:
        rank, num_ranks: over all hosts.
        by_mpi: whether the launcher was mpirun, so that MPI can take part.
    """

    rank: int
    num_ranks: int
    by_mpi: bool


def launched_as(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """Which rank of a launched run this process is; None if nobody has launched it as one.

    Raises:
        ValueError: mpirun has, but the ranks do not know where to meet.
    """
    for rank, size in (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        if rank not in environment or size not in environment:
            continue
        missing = [name for name in _MEETING if name not in environment]
        if not missing:
            return Launched(int(environment[rank]), int(environment[size]), by_mpi=rank != "RANK")
        if rank != "RANK":
            raise ValueError(
                f"started by mpirun, but {' and '.join(missing)} are not set: say where the ranks can meet, on the "
                "first host, by `mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ...`"
            )
    return None


def run_launched(
    config: BenchConfig,
    launched: Launched,
    *,
    begin: Callable[[BenchConfig], None],
    progress: Callable[[float, str], None],
) -> tuple[BenchConfig, list[dict[str, Any]]] | None:
    """Run this process's rank.

    Arguments:
        config: the run; `host_of` is found here.
        launched: which rank this is.
        begin: called on rank 0 when the ranks have met, with the configuration as it then is.
        progress: called on rank 0 as by `run_ranks`.

    Returns:
        On rank 0: the configuration, and by rank what each left. None on the others.
    """
    dist.init_process_group(
        "gloo",
        init_method="env://",
        rank=launched.rank,
        world_size=launched.num_ranks,
        timeout=timedelta(seconds=config.timeout),
    )
    try:
        results = _run(config, launched, begin, progress)
    finally:
        dist.destroy_process_group()
        # A gloo group that is still alive when the interpreter ends aborts the process: nothing may hold it any more.
        gc.collect()
    return results


def hosts_of(hosts: list[str]) -> tuple[int, ...]:
    """By rank, the number of its host, counted from 0 in the order of ranks; from what names each rank's host."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return tuple(numbers[host] for host in hosts)


def _run(
    config: BenchConfig,
    launched: Launched,
    begin: Callable[[BenchConfig], None],
    progress: Callable[[float, str], None],
) -> tuple[BenchConfig, list[dict[str, Any]]] | None:
    process_group = dist.group.WORLD
    assert process_group is not None
    group = as_group(process_group)
    config = dataclasses.replace(config, host_of=hosts_of([peer.host for peer in gather_peers(group)]))
    if launched.rank == 0:
        begin(config)
    barrier = make_barrier(group, process_group, config.timeout)
    try:
        place = Place(process_group, launched.rank, barrier, address=own_address(group, os.environ["MASTER_ADDR"]))
        result = measure_rank(config, place, progress if launched.rank == 0 else lambda share, text: None)
        gathered: list[Any] | None = [None] * launched.num_ranks if launched.rank == 0 else None
        dist.gather_object(result, gathered, dst=0, group=process_group)
    finally:
        barrier.close()
    return None if gathered is None else (config, gathered)
