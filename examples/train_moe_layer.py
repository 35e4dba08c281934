"""Train a Mixture-of-Experts layer whose experts are spread over the ranks.

torchrun --nproc_per_node=2 examples/train_moe_layer.py
"""

import torch
import torch.distributed as dist

import moecomm
from moecomm.nn import GroupedExperts, MoELayer, TopKRouter, synchronize_gradients, take_aux_loss

dist.init_process_group("gloo")
group = dist.group.WORLD
torch.manual_seed(0)  # the router is replicated: the same on every rank

with moecomm.Communicator(group, num_experts=8, hidden=32, num_topk=2) as comm:
    router = TopKRouter(32, 8, 2, balance_coefficient=0.01, loss_group=group)
    layer = MoELayer(router, GroupedExperts.for_communicator(comm, 64, std=0.2), communicator=comm)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    torch.manual_seed(1 + comm.rank)  # every rank has its own tokens, and as many as it likes
    x = torch.randn(256 + 64 * comm.rank, 32)
    for step in range(101):
        loss = (layer(x) - x.roll(1, dims=1).tanh()).square().mean()
        (loss + take_aux_loss(layer)).backward()
        synchronize_gradients(layer, group)  # experts: sum over ranks / ranks; the rest: mean over ranks
        optimizer.step()
        optimizer.zero_grad()
        if comm.rank == 0 and step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")
dist.destroy_process_group()
