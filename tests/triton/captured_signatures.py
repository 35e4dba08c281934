"""A program for test_captured_launches.py: what captured calls are compiled for when they are launched, as JSON.

A stand-in for the driver says that there is a GPU; tensors are on the CPU, and kernels are compiled, not run.
"""

import json
import sys

import torch
from captured_replay import MODULES
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from moecomm.kernels.eager import Form
from moecomm.kernels.triton import captured
from moecomm.kernels.triton.captured import CapturedExchange, captured_memory
from moecomm.kernels.triton.captured_static import StaticExchange

compiled = {}


class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(kernel, num_programs, device, *args, **constants):
    made = kernel.warmup(*args, grid=(num_programs,), **{"num_warps": 4, "enable_fp_fusion": False, **constants})
    kinds = {name: kind for name, kind in made.src.signature.items() if kind != "constexpr"}
    compiled[kernel.__name__] = kinds, made.asm["ptx"]


driver.set_active(Driver())
for module in MODULES:
    module.launch = compile_only
captured.check_device = lambda name, tensor: tensor.device

T, K, H, E, R = 8, 8, 7168, 32, 4
sizes = {"max_tokens_per_rank": T, "max_in_flight": 1}
form = Form(K, H * 2, 4, 0, 8, 1024)
needed = captured_memory(num_ranks=R, num_topk=K, row_bytes=H * 2, value_bytes=4, num_rows=1024, **sizes)
expert_rank = torch.arange(E, dtype=torch.int32) // (E // R)
far = [1 << 40, 2 << 40, 3 << 40, 4 << 40]
exchange = CapturedExchange(
    1,
    boards=far,
    windows=far,
    outputs=far,
    message_bytes=needed.message,
    output_bytes=needed.output,
    expert_rank=expert_rank,
    expert_local=torch.arange(E, dtype=torch.int32) % (E // R),
    **sizes,
)
x, ids, weights = torch.zeros(T, H, dtype=torch.bfloat16), torch.zeros(T, K).long(), torch.zeros(T, K)
y = torch.zeros(1024, H, dtype=torch.bfloat16)
block = exchange.block(form, 5 << 40, 6 << 40)
exchange.dispatch(x, ids, block, topk_weights=weights)
exchange.combine(y, block.placed, x, topk_weights=weights)
static = StaticExchange(exchange, far, far)
grouped = static.block(form, 1 << 30, 1 << 34, T)
flat = static.block(form._replace(alignment=1), 1 << 30, 1 << 34, T, ids_at=1 << 36)
for block, at_home in ((flat, None), (grouped, weights)):
    static.announce(x, ids, block, signature=1, topk_weights=weights)
    static.push(block)
    static.arrive(block)
    kept = static.answered(block, torch.zeros(static.answered_words(block, T)).long(), T)
    static.keep(block, kept)
    values, at = torch.zeros(1024, K) if block is flat else torch.zeros(1024), {"values_at": 1 << 37}
    static.send_rows(y, kept, place=1 << 35, signature=1, values=values, **at)
    home = {"home": torch.zeros(T, K), "topk_idx": ids.int() if block is flat else None}
    static.sum_rows(kept, x, signature=1, topk_weights=at_home, **home)
    static.release(kept)
    # What is launched last counts, and values are narrow.
    static.send_rows(y, block.answered, place=1 << 35, signature=1)
    static.sum_rows(block.answered, x, signature=1, topk_weights=at_home)
    static.release(block.answered)
json.dump(compiled, sys.stdout)
