"""Decode two micro-batches at once: while one's rows travel, the other's experts work.

torchrun --nproc_per_node=2 examples/two_batch_overlap.py
"""

import torch
import torch.distributed as dist

import moecomm
from moecomm.nn import GroupedExperts

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
xs = torch.randn(2, 4, 64)  # two micro-batches of four tokens
ids = torch.rand(2, 4, 8).topk(2, dim=-1).indices
weights = torch.full((4, 2), 0.5)

with moecomm.Communicator(num_experts=8, hidden=64, num_topk=2, max_tokens_per_rank=4, max_in_flight=2) as comm:
    experts = GroupedExperts.for_communicator(comm, intermediate=128)

    def send(x: torch.Tensor, topk_idx: torch.Tensor) -> moecomm.Work:
        return comm.dispatch_async(x, topk_idx, mode="low_latency", layout="expert_major")

    def compute(work: moecomm.Work) -> moecomm.Work:
        received = work.wait()  # receives; since `send` no thread was busy with it
        y = experts(received.x, received.offsets, out=comm.combine_buffer(received.handle, received.x.dtype))
        return comm.combine_async(y, received.handle, weights)

    with torch.no_grad():
        first = send(xs[0], ids[0])
        for _ in range(10):  # layers, say
            second = send(xs[1], ids[1])
            first_home = compute(first)  # while the second's rows travel
            xs[0] += first_home.wait()
            first = send(xs[0], ids[0])  # of the next layer
            second_home = compute(second)  # while the first's rows travel
            xs[1] += second_home.wait()
        first.wait()

print(f"rank {dist.get_rank()}: two micro-batches through 10 layers, |x| = {xs.norm():.3g}")
dist.destroy_process_group()
