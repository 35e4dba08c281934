"""Try things out without processes: every rank is a thread of this one.

python examples/ranks_in_one_process.py
"""

import torch

import moecomm
from moecomm.testing import launch


def rank_main(group: moecomm.Group) -> list[int]:
    x = torch.full((3, 8), float(group.rank))
    topk_idx = torch.tensor([[0, 3], [1, -1], [2, 2]])  # -1 = no expert; twice the same = two rows
    with moecomm.Communicator(group, num_experts=4, hidden=8, num_topk=2) as comm:
        received = comm.dispatch(x, topk_idx)
        assert torch.equal(comm.combine(received.x, received.handle), x * (topk_idx >= 0).sum(1, keepdim=True))
        return received.num_tokens_per_expert.tolist()


if __name__ == "__main__":
    for rank, counts in enumerate(launch(rank_main, 4)):
        print(f"rank {rank}: rows per expert {counts}")
