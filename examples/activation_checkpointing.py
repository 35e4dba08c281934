"""Recompute the layer in backward instead of keeping its activations; the gradients are the same bits.

torchrun --nproc_per_node=2 examples/activation_checkpointing.py
"""

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import moecomm
from moecomm.nn import GroupedExperts, MoELayer, TopKRouter

dist.init_process_group("gloo")
torch.manual_seed(0)

with moecomm.Communicator(num_experts=8, hidden=32, num_topk=2) as comm:
    layer = MoELayer(TopKRouter(32, 8, 2), GroupedExperts.for_communicator(comm, 64, std=0.2), communicator=comm)
    x = torch.randn(100, 32, requires_grad=True)
    gradients = []
    for recompute in (False, True):
        x.grad = None
        out = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        out.square().sum().backward()
        gradients.append(x.grad)

assert torch.equal(*gradients)
print(f"rank {dist.get_rank()}: recomputed, same gradients")
dist.destroy_process_group()
