"""Send rows to the ranks of their experts and bring them back.

torchrun --nproc_per_node=2 examples/dispatch_combine.py
"""

import torch
import torch.distributed as dist

import moecomm

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
x = torch.randn(6, 16)
topk_idx = torch.rand(6, 4).topk(2, dim=1).indices  # [T, K]: two of four experts for each token
topk_weights = torch.full((6, 2), 0.5)

with moecomm.Communicator(num_experts=4, hidden=16, num_topk=2) as comm:
    received = comm.dispatch(x, topk_idx)
    print(f"rank {comm.rank}: rows for experts {list(comm.local_experts)}: {received.num_tokens_per_expert.tolist()}")
    y = 2 * received.x  # what these experts do: rows of one expert lie together, see received.offsets
    out = comm.combine(y, received.handle, topk_weights)

assert torch.allclose(out, 2 * x)
dist.destroy_process_group()
