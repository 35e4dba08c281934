"""All ranks as one function, so that `gradcheck` and `gradgradcheck` can be used on what they do together.

Every rank checks the same function at the same time, from the inputs of all ranks (`shared`) to the outputs of all
ranks (`gathered`), so that all make the same calls. A gradient of the whole is the sum of what the ranks contribute.
"""

import torch


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        return _Summed.apply(grad, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group):
        return sum(group.all_gather(tensor.detach().clone()))

    @staticmethod
    def backward(ctx, grad):
        return grad.clone(), None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, group):
        parts = group.all_gather(rows.detach().clone())
        begin = sum(part.shape[0] for part in parts[: group.rank])
        ctx.mine, ctx.group = slice(begin, begin + rows.shape[0]), group
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        return _Mine.apply(grad, ctx.mine, ctx.group), None


class _Mine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, mine, group):
        ctx.group = group
        return rows[mine].clone()

    @staticmethod
    def backward(ctx, grad):
        return _Gathered.apply(grad, ctx.group), None, None


def shared(tensor, group):
    """The same tensor on every rank."""
    return _Shared.apply(tensor, group)


def gathered(rows, group):
    """Every rank's rows, on every rank."""
    return _Gathered.apply(rows, group)
