"""CUDA graphs of a dispatch, experts and a combine, replayed with new contents. Needs one GPU; run this file by itself.

TRITON_INTERPRET=0 pytest tests/triton/test_cuda_graph.py
"""

import importlib.util
import os

import pytest
import torch
from late_ranks import SIZES

from moecomm import Communicator
from moecomm.testing import launch, masked
from moecomm.testing.compare import assert_bitwise_equal
from moecomm.testing.contracts.cases import random_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets: run this file by itself"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LOW = {"mode": "low_latency"}
LAYOUTS = {
    "slab": LOW,
    "expert_major": {**LOW, "layout": "expert_major", "expert_alignment": 4},
    "fixed": {"expert_alignment": 4, "capacity": 61},
    "fixed flat": {"layout": "flat", "capacity": 16},
}
TOKENS = (5, 8, 0)


def contents(rank, step, dtype):
    num_tokens = TOKENS[rank]
    ids = masked(num_tokens, 6, 3, seed=10 * step + rank)
    weights = torch.rand(num_tokens, 3, generator=torch.Generator().manual_seed(step)).masked_fill(ids < 0, 0)
    return random_rows((num_tokens, 24), dtype, f"{step} {rank}"), ids, weights


def pair(comm, x, ids, weights, options, meet=lambda: None):
    """A dispatch, experts and a combine; ranks `meet` between what sends and what waits for that."""
    work = comm.dispatch_async(x, ids, weights, **options)
    received = in_step(work, meet)
    y, at_home = received.x * 2, None if options.get("layout") == "flat" else weights
    meet()
    return received, in_step(comm.combine_async(y, received.handle, topk_weights=at_home), meet)


def in_step(work, meet):
    meet()
    work.step()
    meet()
    return work.wait()


def capture_and_replay(group, transport, index, dtype, layout):
    options = LAYOUTS[layout]

    def meet():
        torch.cuda.synchronize()
        group.all_gather(None)

    with (
        torch.cuda.device(index),
        Communicator(group, **SIZES, transport=transport, device="cuda", memory_limit=1 << 24) as comm,
        Communicator(group, **SIZES) as native,
    ):
        given = [tensor.cuda() for tensor in contents(group.rank, 0, dtype)]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            pair(comm, *given, options, meet)  # in step, for a kernel that is loaded may wait for those that run
        meet()
        graph = torch.cuda.CUDAGraph()
        for turn in range(group.size):
            if turn == group.rank:
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    received, home = pair(comm, *given, options)
            group.all_gather(None)
        for step in range(1, 9):
            new = contents(group.rank, step, dtype)
            for kept, tensor in zip(given, new, strict=True):
                kept.copy_(tensor)
            meet()
            with torch.cuda.stream(stream):
                graph.replay()
            comm.check()
            wanted, expected = pair(native, *new, options)
            for name in ("x", "topk_weights", "topk_idx", "num_tokens_per_expert"):
                want = getattr(wanted, name)
                if want is not None:
                    assert_bitwise_equal(getattr(received, name).cpu(), want, f"replay {step}: {name}")
            assert_bitwise_equal(home.cpu(), expected, f"replay {step}: sums")
            if step % 3 == 0:  # other calls in between
                with torch.cuda.stream(stream):
                    _, again = pair(comm, *given, options, meet)
                    there = comm.dispatch(given[0], given[1])
                    comm.combine(there.x, there.handle)
                assert_bitwise_equal(again.cpu(), expected, "beside the graph")
        if group.rank == 0:
            given[1][0, 0] = 99
        meet()
        with torch.cuda.stream(stream):
            graph.replay()
        with pytest.raises(ValueError, match=r"topk_idx\[0, 0\] = 99 of the device of .*rank 0"):
            comm.check()
        meet()


def train(comm, x, ids, weights, grad, options):
    """A dispatch, experts, a combine and the backward of them all; gradients of x and weights."""
    x, weights = x.requires_grad_(), weights.requires_grad_()
    received = comm.dispatch(x, ids, weights, **options)
    at_home = None if options.get("layout") == "flat" else weights
    home = comm.combine(received.x * 2, received.handle, topk_weights=at_home)
    of_weights = received.topk_weights.detach() * 0.5  # no sums of torch's, whose order is its own
    return home.detach(), *torch.autograd.grad((home, received.topk_weights), (x, weights), (grad, of_weights))


def capture_and_train(group, transport, index, dtype, layout):
    options = LAYOUTS[layout]

    def given_at(step):
        *inputs, weights = contents(group.rank, step, dtype)
        return *inputs, weights, random_rows(tuple(inputs[0].shape), dtype, f"grad {step} {group.rank}")

    def meet():
        torch.cuda.synchronize()
        group.all_gather(None)

    with (
        torch.cuda.device(index),
        Communicator(group, **SIZES, transport=transport, device="cuda", memory_limit=1 << 24) as comm,
        Communicator(group, **SIZES) as native,
    ):
        given = [tensor.cuda() for tensor in given_at(0)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                train(comm, *given, options)
        meet()
        graph = torch.cuda.CUDAGraph()
        for turn in range(group.size):
            if turn == group.rank:
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    found = train(comm, *given, options)
            group.all_gather(None)
        for step in range(1, 6):
            new = given_at(step)
            with torch.no_grad():
                for kept, tensor in zip(given, new, strict=True):
                    kept.copy_(tensor)
            meet()
            with torch.cuda.stream(stream):
                graph.replay()
            comm.check()
            for name, one, want in zip(("sums", "x", "weights"), found, train(native, *new, options), strict=True):
                assert_bitwise_equal(one.cpu(), want, f"replay {step}: {name}")
        meet()


@pytest.mark.parametrize("layout", ["fixed", "fixed flat"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_forward_and_its_backward(dtype, layout):
    launch(capture_and_train, 1, "local", 0, dtype, layout, timeout=200)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_threads_on_one_gpu(num_ranks, dtype, layout):
    launch(capture_and_replay, num_ranks, "local", 0, dtype, layout, timeout=200)


needs_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy")


@needs_cupy
@pytest.mark.parametrize("layout", ["slab", "fixed", "fixed flat"])
def test_processes_on_one_gpu(layout):
    launch(capture_and_replay, 2, "nvlink", 0, torch.bfloat16, layout, backend="processes", timeout=200)


def on_gpus(group, dtype, layout):
    capture_and_replay(group, "nvlink", group.rank, dtype, layout)


@needs_cupy
@pytest.mark.parametrize("layout", ["slab", "fixed", "fixed flat"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_processes_on_several_gpus(num_ranks, layout):
    if torch.cuda.device_count() < num_ranks or not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip(f"needs {num_ranks} GPUs with peer access")
    launch(on_gpus, num_ranks, torch.bfloat16, layout, backend="processes", timeout=200)


def train_on_gpus(group, layout):
    capture_and_train(group, "nvlink", group.rank, torch.bfloat16, layout)


@needs_cupy
@pytest.mark.parametrize("layout", ["fixed", "fixed flat"])
def test_a_forward_and_its_backward_on_two_gpus(layout):
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("needs 2 GPUs with peer access")
    launch(train_on_gpus, 2, layout, backend="processes", timeout=200)
