"""Decode with experts on two ranks: few tokens per step, not equally many on each rank, sequences that come and go.

torchrun --nproc_per_node=2 examples/decode.py
"""

import time

import torch
import torch.distributed as dist

import moecomm
from moecomm.nn import GroupedExperts, MoELayer, TopKRouter

SLOTS, STEPS = 8, 50
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)  # the same router on both ranks

with moecomm.Communicator(num_experts=8, hidden=64, num_topk=2, max_tokens_per_rank=SLOTS) as comm, torch.no_grad():
    experts = GroupedExperts.for_communicator(comm, intermediate=128)
    layer = MoELayer(TopKRouter(64, 8, 2), experts, communicator=comm, mode="low_latency")
    x = torch.randn(SLOTS, 64)  # stands for the rest of the model
    ends = torch.randint(1, STEPS, (SLOTS,)) * (1 + rank)  # when each slot's sequence is complete
    seconds = []
    for step in range(2 * STEPS):  # all ranks make the same number of steps, also those that have nothing left to do
        begin = time.perf_counter()
        out = layer(x, padding_mask=step >= ends)  # slots that are done go to no expert
        seconds.append(time.perf_counter() - begin)
        x = torch.nn.functional.normalize(x + out)
    arrived = comm.tokens_per_expert.tolist()

median = sorted(seconds)[STEPS]
print(f"rank {rank}: {int(ends.sum())} tokens, {sum(arrived)} rows for its experts, {1e6 * median:.0f} us per step")
dist.destroy_process_group()
