"""Rows between ranks: whole communicators of virtual ranks; a push between two processes on one device over CUDA IPC,
tried and reported; between devices: what exists today.

python benchmarks/gpu/links.py HANDLE NUM_BYTES ...       the other process; started by `run`, not by people
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
from answers import wrong_bits
from context import Context
from exchange import run_pairs
from report import compared, unmeasured
from timing import Timer, Timing
from torch import Tensor

__all__ = ["expected_rows", "make_rows", "run"]

_WAIT_SECONDS = 35.0
_POISON = 0xA5


def make_rows(tokens: int, hidden: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows `[T, H]` int16 and routes `[T, 2]` to rank 0, in reverse and again behind: alike in both processes."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-(2**15), 2**15, (tokens, hidden), generator=generator, dtype=torch.int16)
    places = torch.arange(tokens).flip(0)
    return rows.to(device), torch.stack([places, places + tokens], dim=1).to(device)


def expected_rows(rows: Tensor) -> Tensor:
    """`[2T, H]`: what `make_rows` leaves at rank 0."""
    return torch.cat([rows.flip(0), rows.flip(0)])


def run(context: Context) -> None:
    """One process's push kernel into the memory of another; what is missing is said."""
    sizes = context.sizes
    shape = f"{sizes.tokens} x {sizes.exchange.hidden} bf16, to 2 places"
    context.attempt("push, CUDA IPC", shape, lambda: _try_push(context, shape))
    if context.timer.is_gpu:
        for num_ranks in (1, 2):
            devices = [context.device] * num_ranks
            context.attempt(
                "dispatch + combine, communicator",
                f"{num_ranks} virtual ranks",
                functools.partial(run_pairs, context, num_ranks, devices),
            )
    count = torch.cuda.device_count() if context.timer.is_gpu else 0
    for what in ("dispatch over NVLink", "NCCL all_to_all_single"):
        note = "not measured: there is no launcher for one process per device yet"
        context.add(unmeasured(context.part, what, f"{count} devices", note))


def _try_push(context: Context, shape: str) -> None:
    try:
        _push_between_processes(context, shape)
    except (ImportError, RuntimeError) as error:
        # Containers may forbid it, and CuPy may be missing: neither is a mistake of the kernels.
        note = f"not measured: {type(error).__name__}: {error}"
        context.add(unmeasured(context.part, "push, CUDA IPC", shape, note))


def _push_between_processes(context: Context, shape: str) -> None:
    from cupy.cuda import runtime

    tokens, hidden, device = context.sizes.tokens, context.sizes.exchange.hidden, context.device
    num_bytes = 2 * tokens * hidden * 2
    runtime.setDevice(device.index or 0)
    # Not from a pool of torch or CuPy: a handle names a whole allocation.
    address = runtime.malloc(num_bytes)
    try:
        runtime.memset(address, _POISON, num_bytes)
        runtime.deviceSynchronize()
        handle = runtime.ipcGetMemHandle(address)
        numbers = (num_bytes, tokens, hidden, context.seed, device.index or 0, context.case_seconds)
        told = _ask_child([handle.hex(), *map(str, numbers)])
        runtime.deviceSynchronize()
        got = torch.empty(2 * tokens, hidden, dtype=torch.int16)
        runtime.memcpy(got.data_ptr(), address, num_bytes, runtime.memcpyDeviceToHost)
    finally:
        runtime.free(address)
    rows, _ = make_rows(tokens, hidden, context.seed, torch.device("cpu"))
    moved = 3 * tokens * hidden * 2
    context.add(
        compared(
            context.part,
            "push, CUDA IPC",
            shape,
            Timing(told["median_us"], told["p90_us"], told["repetitions"]),
            bound="device copy of as many bytes",
            bound_us=context.timer.copy(moved, seconds=context.case_seconds).median_us,
            num_bytes=moved,
            wrong=wrong_bits(got, expected_rows(rows)),
        )
    )


def _ask_child(arguments: Sequence[str]) -> dict[str, Any]:
    """What the other process found.

    Raises:
        RuntimeError: it failed, with the end of what it said; or took too long.
    """
    command = [sys.executable, __file__, *arguments]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the other process did not end in {_WAIT_SECONDS:g} s") from error
    if child.returncode:
        raise RuntimeError(f"the other process ended with {child.returncode}: {child.stderr.strip()[-600:]}")
    told: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return told


def _be_child(arguments: Sequence[str]) -> None:
    """Opens the other process's memory, pushes into it, prints the time."""
    from cupy.cuda import runtime

    from moecomm.kernels.triton.rows import TritonRowKernels

    handle = bytes.fromhex(arguments[0])
    _, tokens, hidden, seed, index = map(int, arguments[1:6])
    seconds = float(arguments[6])
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    rows, routes = make_rows(tokens, hidden, seed, device)
    runtime.setDevice(index)
    address = runtime.ipcOpenMemHandle(handle)
    try:
        table, kernels = torch.tensor([address, 0], device=device), TritonRowKernels()
        timing = Timer(device).measure(lambda: kernels.push_rows(rows, routes, table), seconds=seconds)
        torch.cuda.synchronize(device)
    finally:
        runtime.ipcCloseMemHandle(address)
    print(json.dumps(timing.__dict__))


if __name__ == "__main__":
    _be_child(sys.argv[1:])
