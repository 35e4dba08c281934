"""Compute something else while rows travel.

torchrun --nproc_per_node=2 examples/overlap_async.py
"""

import torch
import torch.distributed as dist

import moecomm

dist.init_process_group("gloo")
x = torch.randn(512, 64)
topk_idx = torch.rand(512, 8).topk(2, dim=1).indices
weight = torch.randn(64, 64) / 8

with moecomm.Communicator(num_experts=8, hidden=64, num_topk=2, max_in_flight=2) as comm:
    # Two halves of the batch: while one half's rows are on their way, the other half is computed.
    first, second = (comm.dispatch_async(x[part], topk_idx[part]) for part in (slice(0, 256), slice(256, 512)))
    received = first.wait()
    first_home = comm.combine_async(received.x.relu(), received.handle)
    received = second.wait()
    second_home = comm.combine_async(received.x.relu(), received.handle)
    shared = x @ weight  # a shared expert, say
    out = torch.cat([first_home.wait(), second_home.wait()]) + shared

assert torch.allclose(out, 2 * x.relu() + shared, atol=1e-5)
print(f"rank {dist.get_rank()}: overlapped two halves of {x.shape[0]} tokens")
dist.destroy_process_group()
