"""A program for test_triton_launches.py: what kernels are compiled for when they are launched, as JSON.

A stand-in for the driver says that there is a GPU; tensors are on the CPU, and kernels are compiled, not run.
"""

import json
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from moecomm.kernels.triton import combine, counts, eager, eager_messages, fingerprint, flat, gradients, plans, push
from moecomm.kernels.triton import rows as rows_module
from moecomm.kernels.triton import values as values_module
from moecomm.kernels.triton.rows import TritonRowKernels

compiled = []


class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(kernel, num_programs, device, *args, **constants):
    made = kernel.warmup(*args, grid=(num_programs,), num_warps=4, enable_fp_fusion=False, **constants)
    compiled.append([kernel.__name__, made.src.signature, made.asm["ptx"]])


driver.set_active(Driver())
for module in (combine, counts, eager_messages, fingerprint, flat, gradients, plans, push, values_module):
    module.launch = compile_only
for module in (eager, rows_module):
    module.check_device = lambda name, tensor: tensor.device

kernels = TritonRowKernels()
T, K, H, E, R = 64, 8, 7168, 16, 4
ids, expert_rank = torch.zeros(T, K, dtype=torch.int32), torch.arange(E, dtype=torch.int32) // (E // R)
routes, weights, x = torch.zeros(T, K, dtype=torch.int64), torch.ones(T, K), torch.ones(T, H, dtype=torch.bfloat16)
addresses = [1 << 20] * R
counts.count_by_expert(ids, E)
counts.count_by_rank(ids, expert_rank, R)
fingerprint.launch(fingerprint.fingerprint_kernel, 1, ids.device, ids, T * K, E, routes, IDS=128)
kernels.plan_expert_major(ids, expert_rank, torch.zeros(E, dtype=torch.int64))
kernels.plan_flat(ids, expert_rank, torch.zeros(R, dtype=torch.int64))
kernels.push_rows(x, routes, addresses)
kernels.push_rows(x, routes, addresses, weights=weights)
status = torch.zeros(4 + R, dtype=torch.int64)
kernels.push_rows(x, routes, addresses, status=status)
kernels.push_rows(x, routes, addresses, weights=weights, status=status)
kernels.combine_rows(x, routes, addresses)
kernels.combine_rows(x, routes, addresses, weights=weights)
kernels.pull_values(routes, addresses)
kernels.push_flat_metadata(ids, weights, routes, expert_rank, expert_rank, addresses, addresses)
kernels.pull_flat_values(ids, routes, expert_rank, addresses)
kernels.scale_dot(x, x, weights[:, 0].contiguous())
begins = torch.tensor([0, 3, T])
eager_messages.count_messages(ids, begins, expert_rank)
eager_messages.row_sources(ids, begins, expert_rank, 1, torch.zeros(2, dtype=torch.int64), 16)
json.dump(compiled, sys.stdout)
