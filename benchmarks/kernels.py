"""Row kernels against the memory bound of this machine, measured in the same run.

    python benchmarks/kernels.py [--processes 2] [--tokens 2048] [--hidden 2048] [--topk 8] [--experts 32]

Each process plays one rank: it pushes its rows to every rank's memory (shared, anonymous) and combines what lies there.
All processes run the same step at the same time. Printed: the median (and the best) of the slowest process, GB/s of
the bytes that are written (push) or read (combine), and the ratio to the bound:
    push     stream_scatter of the same rows: each source row read once, written top-k times to consecutive places
    combine  stream_read of as many bytes, consecutive
Every answer is checked.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from statistics import median
from typing import Any

import torch

from moecomm import _C
from moecomm.kernels import kernels_for


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def run_rank(rank: int, args: argparse.Namespace, memories: list[mmap.mmap], barrier: Barrier, queue: Any) -> None:
    torch.set_num_threads(1)
    kernels = kernels_for("cpu")
    num_ranks, tokens, hidden, topk, experts = args.processes, args.tokens, args.hidden, args.topk, args.experts
    dtype = getattr(torch, args.dtype)
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand(tokens, experts, generator=generator).topk(topk).indices
    expert_rank = (torch.arange(experts) * num_ranks // experts).to(torch.int32)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    weights = torch.rand(tokens, topk, generator=generator)
    counts = torch.empty(experts + num_ranks, dtype=torch.int32)
    kernels.count_routes(ids, expert_rank, num_ranks, counts)
    # Each expert has a fixed share of its rank's memory, and each source rank a part of that.
    share = 2 * tokens * topk // experts + 64
    local = torch.arange(experts) - torch.searchsorted(expert_rank, expert_rank)
    bases = (local * num_ranks + rank) * share
    assert int(counts[:experts].max()) <= share
    routes = kernels.plan_expert_major(ids, expert_rank, bases)
    addresses = [address_of(memory) for memory in memories]
    out = torch.empty_like(x)
    row_bytes = hidden * dtype.itemsize
    num_bytes = tokens * topk * row_bytes
    # The bound writes to this rank's own half of memory, consecutively.
    plain = address_of(memories[rank])

    steps: dict[str, Callable[[], Any]] = {
        "scatter bound": lambda: _C.stream_scatter(plain, x.data_ptr(), tokens, row_bytes, topk),
        "push": lambda: kernels.push_rows(x, routes, addresses),
        "push weighted": lambda: kernels.push_rows(x, routes, addresses, weights=weights),
        "read bound": lambda: _C.stream_read(plain, num_bytes),
        "combine": lambda: kernels.combine_rows(out, routes, addresses),
        "combine weighted": lambda: kernels.combine_rows(out, routes, addresses, weights=weights),
        "count + plan": lambda: (
            kernels.count_routes(ids, expert_rank, num_ranks, counts),
            kernels.plan_expert_major(ids, expert_rank, bases),
        ),
    }
    kernels.push_rows(x, routes, addresses)
    barrier.wait()
    kernels.combine_rows(out, routes, addresses, weights=weights)
    want = torch.zeros(tokens, hidden)
    for k in range(topk):
        want += weights[:, k, None] * x.float()
    is_right = torch.equal(out, want.to(dtype))
    barrier.wait()
    times: dict[str, list[float]] = {name: [] for name in steps}
    # One step of each kind per round, so that a disturbance from outside meets all of them alike.
    for _ in range(args.rounds + 2):
        for name, step in steps.items():
            barrier.wait()
            begin = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - begin)
    queue.put((rank, is_right, num_bytes, {name: (median(each[2:]), min(each[2:])) for name, each in times.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"processes": 2, "tokens": 2048, "hidden": 2048, "topk": 8, "experts": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--instruction-set", default="auto")
    args = parser.parse_args()
    _C.set_instruction_set(args.instruction_set)
    share = 2 * args.tokens * args.topk // args.experts + 64
    per_rank = share * -(-args.experts // args.processes) * args.processes
    nbytes = per_rank * args.hidden * getattr(torch, args.dtype).itemsize
    nbytes = max(nbytes, args.tokens * args.topk * args.hidden * getattr(torch, args.dtype).itemsize)
    memories = [mmap.mmap(-1, nbytes) for _ in range(args.processes)]
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(args.processes), context.Queue()
    ranks = [
        context.Process(target=run_rank, args=(rank, args, memories, barrier, queue)) for rank in range(args.processes)
    ]
    for process in ranks:
        process.start()
    results = [queue.get(timeout=300) for _ in ranks]
    for process in ranks:
        process.join()
    print(
        f"{args.processes} ranks, {args.tokens} tokens x {args.hidden} {args.dtype}, top-{args.topk} of {args.experts},"
    )
    print(f"instruction set {_C.instruction_set()}, answers {'right' if all(r[1] for r in results) else 'WRONG'}")
    bounds = (0.0, 0.0)
    for name in results[0][3]:
        middle, best = (max(result[3][name][i] for result in results) for i in range(2))
        if name.endswith("bound"):
            bounds = (middle, best)
        line = f"  {name:17s} {middle * 1e3:8.3f} ms (best {best * 1e3:8.3f})"
        if name != "count + plan":
            line += f"  {results[0][2] / middle / 1e9:6.1f} GB/s  {bounds[0] / middle:5.2f} of the bound"
            line += f" (best {bounds[1] / best:5.2f})"
        print(line)


if __name__ == "__main__":
    main()
