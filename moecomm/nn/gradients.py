"""What to do to gradients after backward, when some parameters are replicated and others (the experts) are spread."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moecomm.groups import Group, as_group
from moecomm.nn.experts import GroupedExperts
from moecomm.nn.reductions import sum_over_group

__all__ = ["clip_grad_norm", "dense_parameters", "expert_parameters", "synchronize_gradients"]

AnyGroup = Group | dist.ProcessGroup | DeviceMesh | None


def expert_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of every `GroupedExperts` within `module`: each rank holds its own."""
    found = (part for part in module.modules() if isinstance(part, GroupedExperts))
    return [parameter for experts in found for parameter in experts.parameters()]


def dense_parameters(module: nn.Module) -> list[nn.Parameter]:
    """All other parameters of `module`: each rank holds the same."""
    experts = {id(parameter) for parameter in expert_parameters(module)}
    return [parameter for parameter in module.parameters() if id(parameter) not in experts]


def synchronize_gradients(module: nn.Module, group: AnyGroup, *, expert_group: AnyGroup = None) -> None:
    """Makes gradients those of the mean of the ranks' losses. Collective; call it between backward and the optimizer.

    Dense gradients are averaged over `group`, one all-reduce per dtype; a missing one counts as zeros. Expert gradients
    already are sums over the EP group: they are summed over `expert_group` and divided by the size of `group`.

    Arguments:
        group: all the ranks whose losses are averaged.
        expert_group: the ranks that hold copies of *this* rank's experts, when `group` is several EP groups; None =
            no copies, `group` is the EP group itself.
    """
    ranks = as_group(group)
    copies = None if expert_group is None else as_group(expert_group)
    _sum_gradients(dense_parameters(module), ranks, divisor=ranks.size)
    _sum_gradients(expert_parameters(module), copies, divisor=ranks.size)


@torch.no_grad()
def clip_grad_norm(module: nn.Module, max_norm: float, *, group: AnyGroup) -> Tensor:
    """Scales all gradients so that their 2-norm, the experts of every rank included, is at most `max_norm`.

    Collective; call it after `synchronize_gradients`. Every rank gets the same norm and scales by the same factor.

    Arguments:
        max_norm: the limit.
        group: the EP group.

    Returns:
        Scalar fp32, the norm before scaling.
    """
    dense = [parameter.grad for parameter in dense_parameters(module) if parameter.grad is not None]
    experts = [parameter.grad for parameter in expert_parameters(module) if parameter.grad is not None]
    square = _square_norm(dense) + sum_over_group(_square_norm(experts), as_group(group))
    norm = square.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in (*dense, *experts):
        gradient.mul_(factor.to(gradient))
    return norm.to(torch.float32)


def _square_norm(gradients: list[Tensor]) -> Tensor:
    """fp64 scalar: a sum of fp32 norms, each squared in fp64."""
    total = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        wide = gradient if gradient.dtype == torch.float64 else gradient.float()
        total += torch.linalg.vector_norm(wide).double().square().cpu()
    return total


@torch.no_grad()
def _sum_gradients(parameters: list[nn.Parameter], group: Group | None, *, divisor: int) -> None:
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for same in by_dtype.values():
        for parameter in same:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in same if parameter.grad is not None]
        if group is not None and group.size > 1:
            total = sum_over_group(torch.cat([gradient.reshape(-1) for gradient in gradients]), group)
            parts = torch.split(total, [gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        for gradient in gradients:
            gradient.div_(divisor)
