"""Save the experts of several ranks as one model, and load it on a single rank.

torchrun --nproc_per_node=2 examples/save_and_load.py
"""

import torch
import torch.distributed as dist

import moecomm
from moecomm.nn import GroupedExperts, MoELayer, TopKRouter

dist.init_process_group("gloo")
sizes = {"num_experts": 8, "hidden": 32, "num_topk": 2}
x = torch.randn(10, 32, generator=torch.Generator().manual_seed(0))


def make_layer(comm: moecomm.Communicator) -> MoELayer:
    return MoELayer(TopKRouter(32, 8, 2), GroupedExperts.for_communicator(comm, 64, std=0.2), communicator=comm)


torch.manual_seed(0)
with moecomm.Communicator(**sizes) as comm, torch.no_grad():
    layer = make_layer(comm)
    parts = [{}] * comm.num_ranks
    dist.all_gather_object(parts, layer.state_dict())  # each rank's own experts, named by their global ids
    want = layer(x)

whole = {name: tensor for part in parts for name, tensor in part.items()}
with moecomm.Communicator(moecomm.SoloGroup(), **sizes) as comm, torch.no_grad():
    alone = make_layer(comm)
    alone.load_state_dict(whole)
    assert torch.allclose(alone(x), want, atol=1e-6)

print(f"rank {dist.get_rank()}: {len(whole)} tensors, the same outputs on one rank")
dist.destroy_process_group()
