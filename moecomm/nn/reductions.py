"""Sums over a group that do not care what kind of group it is."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from moecomm.groups import Group, TorchGroup

__all__ = ["sum_over_group"]


def sum_over_group(tensor: Tensor, group: Group | None) -> Tensor:
    """Adds up `tensor` over the ranks of `group`; the same result on every rank. Not differentiable.

    Arguments:
        tensor: any shape and dtype, the same on every rank. Left as it is.
        group: None or a group of one rank means this rank alone.

    Returns:
        A new tensor of the same shape and dtype.
    """
    total = tensor.detach().clone()
    if group is None or group.size == 1:
        return total
    if isinstance(group, TorchGroup):
        dist.all_reduce(total, group=group.process_group)
        return total
    # Groups of threads exchange references: each rank sums copies that nobody writes to, in rank order.
    return torch.stack(group.all_gather(total)).sum(dim=0, dtype=total.dtype)
