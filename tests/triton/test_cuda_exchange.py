"""Exchanges of CUDA tensors: the bits of the native kernels. Needs one GPU; run this file by itself.

TRITON_INTERPRET=0 pytest tests/triton/test_cuda_exchange.py
"""

import importlib.util
import os

import pytest
import torch
from late_ranks import CAPACITY, LOW_LATENCY, SIZES, THROUGHPUT, compare_with_native, on_device

from moecomm import Communicator
from moecomm.testing import launch, uniform

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets: run this file by itself"),
]
KINDS = THROUGHPUT | CAPACITY | LOW_LATENCY
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def exchange(group, transport, index, dtype):
    with torch.cuda.device(index), torch.cuda.stream(torch.cuda.Stream(index)):
        got = on_device(group, transport, torch.device("cuda", index), dtype, KINDS)
    compare_with_native(group, got, dtype, KINDS)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_on_one_gpu(num_ranks, dtype):
    launch(exchange, num_ranks, "local", 0, dtype, timeout=200)


needs_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy")


@needs_cupy
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_processes_on_one_gpu(dtype):
    launch(exchange, 2, "nvlink", 0, dtype, backend="processes", timeout=200)


def on_gpus(group, dtype):
    exchange(group, "nvlink", group.rank, dtype)


@needs_cupy
def test_processes_on_two_gpus():
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("needs two GPUs with peer access")
    launch(on_gpus, 2, torch.bfloat16, backend="processes", timeout=200)


def in_order(group):
    """Inputs that long kernels make and results that are read at once, on a stream of the caller's."""
    with torch.cuda.stream(torch.cuda.Stream()), Communicator(group, **SIZES, device="cuda") as comm:
        for step in range(20):
            ids = uniform(64, 6, 3, seed=step).cuda()
            x = torch.full((64, 24), float("nan"), device="cuda")
            torch.cuda._sleep(20_000_000)
            x.fill_(step)
            received = comm.dispatch(x, ids)
            y, handle = received.x * 2, received.handle
            del received  # its memory is granted again while the product may still be read
            home = comm.combine(y, handle)
            assert torch.equal(home, torch.full_like(home, 6.0 * step))


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_streams_are_in_order(num_ranks):
    launch(in_order, num_ranks, timeout=100)


def test_nobody_waits_but_for_counts():
    with Communicator(None, **SIZES, device="cuda") as comm:
        x, ids = torch.ones(8, 24, device="cuda"), uniform(8, 6, 3, seed=0).cuda()
        received = comm.dispatch(x, ids)
        comm.combine(received.x, received.handle)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # about a second
        comm.dispatch(x, None, handle=received.handle)
        home = comm.combine(received.x, received.handle)
        assert not torch.cuda.current_stream().query(), "the host has waited for the device"
        assert torch.equal(home, 3 * x)
