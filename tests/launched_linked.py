"""A program for test_nvshmem_cubins.py: what is compiled and initialised when kernels that call NVSHMEM are launched.

A stand-in for the driver says that there is a GPU; tensors are on the CPU, and kernels are compiled, not run.
"""

import contextlib
import json
import sys
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

from moecomm.kernels.captured import FarMemory
from moecomm.kernels.far_runs import Memory, make_runs
from moecomm.kernels.triton import captured_far, far_push, far_wait, nvshmem_device, signals
from moecomm.kernels.triton.captured_blocks import make_arrived
from moecomm.kernels.triton.captured_combine import Outputs
from moecomm.kernels.triton.captured_messages import MessageLayout, Windows
from moecomm.kernels.triton.captured_state import NUM_SLOTS, make_control
from moecomm.kernels.wire import DeviceLibrary, Wire


class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


compiled, events = [], []


def init_handles(made):
    compiled.append([made.src.fn.__name__, made.src.signature])
    made.module = 1000 + len(compiled)


def launch_only(kernel, num_programs, device, *args, **options):
    events.append(f"launch {kernel.__name__}")


driver.set_active(Driver())
CompiledKernel._init_handles = init_handles
nvshmem_device.launch = launch_only
torch.cuda.device = lambda device: contextlib.nullcontext()
for module in (far_push, far_wait):
    module.check_device = lambda name, tensor: tensor.device

library = DeviceLibrary(Path(sys.argv[1]), lambda module: events.append(f"initialise {module}"))
table = torch.zeros(2, dtype=torch.int64)
pes, status = torch.zeros(2, dtype=torch.int32), signals.make_status(2, "cpu")
# Numbers of any size are numbers of one type: 1 and 0 and what is beyond 32 bits.
for address in (1 << 40, 1, 0):
    wire = Wire(rank=0, boards=table, pes=pes, board=address, num_slots=NUM_SLOTS, library=library)
    runs = make_runs([], 2, "cpu")
    far_push.far_push(wire, runs, source=Memory(address, 0), region=Memory(address, 0), slot=0, n=address)
    far_wait.far_wait(wire, 0, address, status=status, timeout_ns=address)
    control, operations = make_control(0, [address, 0], torch.device("cpu"), address, 2)
    begun, far, ints = operations[0], FarMemory(wire, address, address, address), torch.zeros(2, dtype=torch.int32)
    how, layout = (control, begun, begun.begun, far), MessageLayout(address, address, address)
    captured_far.put_messages(*how, Windows(address, address, 1, 1), layout, address, ints)
    outputs = Outputs(table, address, 16, address)
    arrived = make_arrived(2, 2, 1, torch.zeros(1, dtype=torch.int64))
    captured_far.put_outputs(*how, outputs, address, arrived, (ints, ints), table)
json.dump({"compiled": compiled, "events": events}, sys.stdout)
