"""Launches of the grouped GEMM on a driver that only compiles: run by test_grouped_gemm_launches.py in its own process.

What Triton makes of the arguments of a launch (ones and None become constants, multiples of 16 are known as such) is
seen neither by the interpreter nor by kernels compiled from a stated signature.
"""

import json
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from moecomm.kernels.triton import gathered_rows, grouped_gemm, tile_shapes
from moecomm.kernels.triton.grouped_swiglu import grouped_swiglu
from moecomm.kernels.triton.segments import Segments


class CompilingDriver:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return self.target


def compile_launches(capability, *, uses_descriptors):
    """Runs experts forward and backward, compiles each launch; `[name, epilogue, descriptors]` of each."""
    driver.set_active(CompilingDriver(capability))
    launched = []

    def launch(kernel, num_programs, device, *args, **constexprs):
        options = {"num_warps": 4, "enable_fp_fusion": False, **constexprs}
        kernel.warmup(*args, grid=(num_programs,), **options)
        described = constexprs.get("DESCRIPTORS") or ("rows" if constexprs.get("REST_STAGES") == 1 else "none")
        launched.append([kernel.__name__, constexprs.get("EPILOGUE"), described])

    def choose(kind, *, compute, rows_per_expert, allows_descriptors=False, **_):
        shapes = tile_shapes.candidate_shapes(
            kind, compute.itemsize, rows_per_expert, capability, allows_descriptors=allows_descriptors
        )
        return shapes[-1 if uses_descriptors else 0]

    grouped_gemm.launch = gathered_rows.launch = launch
    grouped_gemm.choose_shape = choose
    grouped_gemm.check_device = lambda name, tensor: tensor.device
    grouped_gemm.num_programs = lambda shape, max_tiles, device: max_tiles
    sizes = [(300, 2, 64, 64, False)] if uses_descriptors else [(1, 1, 1, 1, True), (40, 3, 64, 48, True)]
    for num_rows, num_experts, hidden, intermediate, has_options in sizes:
        ends = torch.zeros(num_experts, dtype=torch.int32)
        tensors = [
            torch.randn(num_rows, hidden),
            torch.randn(num_experts, 2 * intermediate, hidden),
            torch.randn(num_experts, hidden, intermediate),
        ]
        tensors = [tensor.bfloat16().requires_grad_() for tensor in tensors]
        options = {}
        if has_options:
            options = {"row_idx": torch.zeros(num_rows, dtype=torch.int64)}
            options["row_weights"] = torch.rand(num_rows, requires_grad=True)
        y = grouped_swiglu(*tensors, segments=Segments.expert_major(num_rows, ends, ends), **options)
        y.backward(torch.ones_like(y))
    segments = Segments.slab(1, torch.zeros(2, dtype=torch.int64))
    grouped_gemm.grouped_gemm(torch.zeros(2, 64), torch.zeros(2, 64, 32), segments)
    return launched


if __name__ == "__main__":
    sys.stdout.write(json.dumps(compile_launches(int(sys.argv[1]), uses_descriptors=sys.argv[2] == "descriptors")))
