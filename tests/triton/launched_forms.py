"""A program for test_launched_forms.py: in which forms kernels are launched for many sizes, as JSON.

A stand-in for the driver says that there is a GPU; tensors are on the CPU, and nothing is compiled or run.
"""

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from moecomm.kernels.captured import FarMemory
from moecomm.kernels.eager import Form
from moecomm.kernels.far_runs import FarRun, Memory, make_runs
from moecomm.kernels.triton import (
    eager_messages,
    far_push,
    far_wait,
    fingerprint,
    gathered_rows,
    grouped_gemm,
    grouped_swiglu,
    push,
    signals,
    tile_shapes,
)
from moecomm.kernels.triton.captured import CapturedExchange, captured_memory
from moecomm.kernels.triton.captured_state import NUM_SLOTS
from moecomm.kernels.triton.captured_static import StaticExchange
from moecomm.kernels.triton.compile_case import NUMBERS_OF_RANKS
from moecomm.kernels.triton.rows import TritonRowKernels
from moecomm.kernels.triton.segments import Segments
from moecomm.kernels.wire import Wire

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int32, torch.int64)
NUMBERS_OF_CHOICES = (1, 2, 8, 16)
FAR = 1 << 40
found = {}


class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def note(*, fn, compile, **_):
    """Instead of a compiler."""
    names = fn.jit_function.arg_names
    constants = {names[position]: value for (position, *_), value in compile["constants"].items()}
    form = {
        "kernel": fn.name,
        "types": {name: kind for name, kind in compile["signature"].items() if kind != "constexpr"},
        "constants": {name: shown(value) for name, value in constants.items()},
        "num_warps": compile["num_warps"],
        "num_stages": compile["num_stages"],
    }
    found.setdefault(json.dumps(form, sort_keys=True), form)
    return True


def shown(value):
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def launch(kernel, num_programs, device, *args, **constants):
    if num_programs:
        kernel.warmup(*args, grid=(1,), **{"num_warps": 4, "enable_fp_fusion": False, **constants})


def launch_linked(kernel, num_programs, device, library, *args, **constants):
    launch(kernel, num_programs, device, *args, **constants)


def stand_in():
    driver.set_active(Driver())
    triton.knobs.runtime.jit_cache_hook = note
    ours = {"launch": launch, "launch_linked": launch_linked, "check_device": lambda name, tensor: tensor.device}
    for name, module in list(sys.modules.items()):
        if name.startswith("moecomm.kernels.triton."):
            for function in ours.keys() & vars(module).keys():
                setattr(module, function, ours[function])


# -- kernels of rows ---------------------------------------------------------------------------------------------------


def counts_and_plans(kernels, num_ranks, num_topk, ids_dtype):
    num_experts = 2 * num_ranks
    ids = torch.zeros(64, num_topk, dtype=ids_dtype)
    expert_rank = torch.arange(num_experts, dtype=torch.int32) // 2
    sums = torch.zeros(2, 2, dtype=torch.int64)
    launch(fingerprint.fingerprint_kernel, 1, ids.device, ids, ids.numel(), num_experts, sums, IDS=128)
    kernels.plan_expert_major(ids, expert_rank, torch.zeros(num_experts, dtype=torch.int64))
    kernels.plan_flat(ids, expert_rank, torch.zeros(num_ranks, dtype=torch.int64))
    routes, addresses = torch.zeros(64, num_topk, dtype=torch.int64), [FAR] * num_ranks
    for weights in (None, torch.zeros(64, num_topk), torch.zeros(64, num_topk).double()):
        where = None if weights is None else addresses
        for status in (None, signals.make_status(num_ranks, "cpu")):
            kernels.push_flat_metadata(ids, weights, routes, expert_rank, expert_rank, addresses, where, status=status)
        if weights is not None:
            kernels.pull_flat_values(ids, routes, expert_rank, addresses, dtype=weights.dtype)
            kernels.pull_values(routes, addresses, dtype=weights.dtype)
    begins = torch.zeros(num_ranks + 1, dtype=torch.int64)
    eager_messages.count_messages(ids.int(), begins, expert_rank)
    eager_messages.row_sources(ids.int(), begins, expert_rank, 0, torch.zeros(num_ranks, dtype=torch.int64), 16)


def rows_of(kernels, dtype, num_tokens, hidden):
    x, routes = torch.empty(num_tokens, hidden, dtype=dtype), torch.zeros(num_tokens, 8, dtype=torch.int64)
    weights = torch.empty(num_tokens, 8, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    status = signals.make_status(1, "cpu")
    for scale in (None, weights):
        kernels.combine_rows(x, routes, [FAR], weights=scale)
        for one in (None, status):
            kernels.push_rows(x, routes, [FAR], weights=scale, status=one)
    kernels.scale_dot(x, x, weights[:, 0].contiguous())
    row_bytes = hidden * x.element_size()
    push.push_address_rows(routes[:, 0].contiguous(), 16, row_bytes, routes[:, :1].contiguous(), [FAR])


def signals_of(num_ranks):
    boards, status = torch.full((num_ranks,), FAR), signals.make_status(num_ranks, "cpu")
    for one in (None, status):
        signals.signal_all(boards, 0, 1, status=one)
    for at_least in (1, torch.zeros(1, dtype=torch.int64)):
        signals.wait(FAR, 0, at_least, status=status, timeout_ns=1)
    if num_ranks == 1:
        return
    pes = torch.zeros(num_ranks, dtype=torch.int32)
    wire = Wire(rank=0, boards=boards, pes=pes, board=FAR, num_slots=2)
    for at_least in (1, torch.zeros(1, dtype=torch.int64)):
        far_wait.far_wait(wire, 0, at_least, status=status, timeout_ns=1)
    some = torch.ones(num_ranks, dtype=torch.int32)
    far_wait.far_wait(wire, 0, 1, status=status, timeout_ns=1, awaited=some)


def put_runs():
    """One program per rank, and several, as a stream's signals take them."""
    wire = Wire(rank=0, boards=torch.tensor([FAR, 0]), pes=torch.zeros(2, dtype=torch.int32), board=FAR, num_slots=2)
    runs, memory = make_runs([FarRun(1, 0, 0, 16)], 2, "cpu"), Memory(FAR, 1 << 20)
    status, arrivals = signals.make_status(2, "cpu"), torch.zeros(2, dtype=torch.int32)
    for parts, one in ((1, None), (1, status), (4, status)):
        how = {"slot": 0, "parts": parts, "arrivals": arrivals, "status": one}
        far_push.far_push(wire, runs, source=memory, region=memory, **how)


# -- captured calls ----------------------------------------------------------------------------------------------------


def captured(
    num_ranks=8,
    *,
    num_local=2,
    num_topk=8,
    hidden=7168,
    dtype=torch.bfloat16,
    num_tokens=128,
    ids_dtype=torch.int64,
    values=torch.float32,
    is_far=False,
):
    num_experts, row_bytes = num_ranks * num_local, hidden * dtype.itemsize
    value_bytes = 0 if values is None else values.itemsize
    sizes = {"max_tokens_per_rank": num_tokens, "max_in_flight": 1}
    needed = captured_memory(
        num_ranks=num_ranks, num_topk=num_topk, row_bytes=row_bytes, value_bytes=value_bytes, num_rows=64, **sizes
    )
    near = [FAR] + [0 if is_far else FAR] * (num_ranks - 1)
    far = None
    if is_far:
        pes = torch.zeros(num_ranks, dtype=torch.int32)
        wire = Wire(rank=0, boards=torch.tensor(near), pes=pes, board=FAR, num_slots=NUM_SLOTS)
        far = FarMemory(wire, FAR, FAR, needed.landing)
    exchange = CapturedExchange(
        0,
        boards=near,
        windows=near,
        outputs=near,
        message_bytes=needed.message,
        output_bytes=needed.output,
        expert_rank=torch.arange(num_experts, dtype=torch.int32) // num_local,
        expert_local=torch.arange(num_experts, dtype=torch.int32) % num_local,
        far=far,
        **sizes,
    )
    form = Form(num_topk, row_bytes, value_bytes, 0, 8, 64)
    x, ids = torch.empty(num_tokens, hidden, dtype=dtype), torch.zeros(num_tokens, num_topk, dtype=ids_dtype)
    weights = None if values is None else torch.empty(num_tokens, num_topk, dtype=values)
    wide = torch.empty(num_tokens, num_topk, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    y = torch.empty(64, hidden, dtype=dtype)
    block = exchange.block(form, FAR, FAR)
    for at_home in (None, wide):
        exchange.dispatch(x, ids, block, topk_weights=weights)
        exchange.combine(y, block.placed, x, topk_weights=at_home)
    if is_far:
        return
    static = StaticExchange(exchange, near, near)
    grouped = static.block(form, FAR, FAR, num_tokens)
    flat = static.block(form._replace(alignment=1), FAR, FAR, num_tokens, ids_at=FAR)
    for block, at_home in ((flat, None), (grouped, wide)):
        static.announce(x, ids, block, signature=1, topk_weights=weights)
        static.push(block)
        static.arrive(block)
        static.keep(
            block, static.answered(block, torch.zeros(static.answered_words(block, num_tokens)).long(), num_tokens)
        )
        home = {}
        if values is not None:
            home["values"] = torch.empty(64, num_topk, dtype=values) if block is flat else torch.empty(64, dtype=values)
        static.send_rows(y, block.answered, place=0, signature=1, **home)
        if values is not None:
            home = {"home": torch.empty(num_tokens, num_topk, dtype=values)}
            home["topk_idx"] = ids if block is flat else None
        static.sum_rows(block.answered, x, signature=1, topk_weights=at_home, **home)
        static.release(block.answered)


# -- experts -----------------------------------------------------------------------------------------------------------


def experts(dtype, segments, *, hidden=512, intermediate=1024, is_gathered=False, is_weighted=False):
    """Forward and backward, each product in every shape that may be measured."""
    tensors = [
        torch.empty(segments.num_rows, hidden, dtype=dtype),
        torch.empty(segments.num_experts, 2 * intermediate, hidden, dtype=dtype),
        torch.empty(segments.num_experts, hidden, intermediate, dtype=dtype),
    ]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    options = {}
    if is_gathered:
        options["row_idx"] = torch.zeros(segments.num_rows, dtype=torch.int64)
    if is_weighted:
        options["row_weights"] = torch.empty(segments.num_rows, requires_grad=True)
    constants = {name: option.detach() for name, option in options.items()}
    grouped_swiglu.grouped_swiglu(*(tensor.detach() for tensor in tensors), segments=segments, **constants)
    for clears in (True, False):
        y = grouped_swiglu.grouped_swiglu(*tensors, segments=segments, clears_padding=clears, **options)
        y.backward(torch.ones_like(y))


def choose(kind, *, compute, rows_per_expert, allows_descriptors=False, launch, **_):
    how = {"allows_descriptors": allows_descriptors}
    shapes = [
        shape
        for capability in (80, 90, 100)
        for shape in tile_shapes.candidate_shapes(kind, compute.itemsize, rows_per_expert, capability, **how)
    ]
    for shape in shapes:
        launch(shape)
    return shapes[0]


def main():
    stand_in()
    grouped_gemm.choose_shape = choose
    grouped_gemm.num_programs = lambda shape, max_tiles, device: max_tiles
    kernels = TritonRowKernels()
    for num_topk in NUMBERS_OF_CHOICES:
        for ids_dtype in INTS:
            counts_and_plans(kernels, 8, num_topk, ids_dtype)
    for dtype in FLOATS:
        for num_tokens in (1, 64, 4096):
            for hidden in (1, 8, 24, 256, 7166, 7168):
                rows_of(kernels, dtype, num_tokens, hidden)
    put_runs()
    for num_ranks in NUMBERS_OF_RANKS:
        counts_and_plans(kernels, num_ranks, 8, torch.int64)
        signals_of(num_ranks)
        captured(num_ranks, num_tokens=8)
        captured(num_ranks, num_tokens=8, is_far=num_ranks > 1)
    for is_far in (False, True):
        for values in (None, torch.float32, torch.float64):
            for ids_dtype in INTS:
                captured(ids_dtype=ids_dtype, values=values, is_far=is_far, num_tokens=8)
        for num_topk in NUMBERS_OF_CHOICES:
            captured(num_topk=num_topk, is_far=is_far, hidden=24)
        for dtype in FLOATS:
            for num_tokens in (1, 8, 1024):
                for hidden in (1, 8, 256, 7166, 7168):
                    captured(dtype=dtype, num_tokens=num_tokens, hidden=hidden, is_far=is_far)
        for num_local in (1, 32, 256):
            captured(2, num_local=num_local, num_tokens=8, hidden=256, is_far=is_far)
    for dtype in FLOATS[1:]:
        for rows_per_expert in (16, 32, 64, 1024):
            ends = torch.zeros(40, dtype=torch.int32)
            for options in ({}, {"is_weighted": True}, {"is_gathered": True, "is_weighted": True}):
                experts(dtype, Segments.expert_major(40 * rows_per_expert, ends), **options)
            experts(dtype, Segments.slab(rows_per_expert, ends.long()))
        experts(dtype, Segments.expert_major(40 * 1024, ends), hidden=528, intermediate=1040)
        gathered_rows.sum_routed_rows(torch.empty(64, 7168, dtype=dtype), torch.zeros(8, 8, dtype=torch.int64))
    json.dump(list(found.values()), sys.stdout)


if __name__ == "__main__":
    main()
