"""The interpreter with fences: a kernel that touches a byte that is none of its arguments' fails, read or written.

Arguments that are tensors may be touched as far as they reach, and no further into the memory behind them. What kernels
get as addresses is allowed by the test, and what torch.empty_like makes, which some of them fill by address; or any
tensor whose address somebody has asked for.
"""

import contextlib

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, _get_np_dtype, interpreter_builder


class OutOfBounds(AssertionError):
    """A kernel has left its memory."""


_address_of = torch.Tensor.data_ptr


def extent_of(tensor):
    """First byte and byte after the last."""
    address = _address_of(tensor)
    if tensor.numel() == 0:
        return address, address
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return address, address + (last + 1) * tensor.element_size()


class Fences:
    """What may be touched, and which kernels have run inside."""

    def __init__(self):
        self.allowed = []
        self.kernels = set()
        self._kept = []

    def allow(self, *tensors):
        self._kept += tensors  # or their memory could become another's
        self.allowed += [extent_of(tensor) for tensor in tensors]
        return tensors[0] if len(tensors) == 1 else tensors

    def allow_rows(self, memory, num_rows):
        """The rows of every rank in a `kernel_cases.Memory`, not the gaps between them."""
        row_bytes = memory.columns * memory.dtype.itemsize
        ranges = zip(memory.addresses, num_rows, strict=True)
        self.allowed += [(address, address + rows * row_bytes) for address, rows in ranges]
        self._kept.append(memory)
        return memory

    @contextlib.contextmanager
    def launch(self, executor, arguments):
        self.kernels.add(executor.fn.__name__)
        before = self.allowed
        bases = [getattr(argument, "base", argument) for argument in arguments]
        self.allowed = before + [extent_of(base) for base in bases if isinstance(base, torch.Tensor)]
        try:
            yield
        finally:
            self.allowed = before

    def check(self, what, pointers, mask, size):
        addresses = pointers[np.broadcast_to(mask, pointers.shape)].astype(np.int64)
        merged = []
        for begin, end in sorted(self.allowed):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([begin, end])
        begins, ends = np.array(merged, dtype=np.int64).reshape(-1, 2).T
        place = np.searchsorted(begins, addresses, side="right") - 1
        is_inside = (place >= 0) & (addresses + size <= ends[place]) if len(begins) else np.zeros(len(addresses), bool)
        if not is_inside.all():
            raise OutOfBounds(f"{what} of {size} bytes at {addresses[~is_inside][:3]}, outside of {merged}")


@contextlib.contextmanager
def fences(monkeypatch, *, follows_addresses=False):
    """Everything that is launched inside is watched. `follows_addresses`: who asks for an address may hand it on."""
    fence = Fences()
    plain_call, plain_like = GridExecutor.__call__, torch.empty_like
    plain = {name: getattr(interpreter_builder, f"create_{name}") for name in ("masked_load", "masked_store")}
    atomics = {name: getattr(interpreter_builder, f"create_atomic_{name}") for name in ("rmw", "cas")}

    def size_of(pointers):
        return np.dtype(_get_np_dtype(pointers.get_element_ty())).itemsize

    def call(executor, *arguments, **options):
        with fence.launch(executor, [*arguments, *options.values()]):
            return plain_call(executor, *arguments, **options)

    def load(pointers, mask, *rest):
        fence.check("a load", pointers.data, mask.data, size_of(pointers))
        return plain["masked_load"](pointers, mask, *rest)

    def store(pointers, value, mask, *rest):
        fence.check("a store", pointers.data, mask.data, size_of(pointers))
        return plain["masked_store"](pointers, value, mask, *rest)

    def rmw(op, pointers, value, mask, *rest):
        fence.check("an atomic", pointers.data, mask.data, value.data.itemsize)
        return atomics["rmw"](op, pointers, value, mask, *rest)

    def cas(pointers, expected, *rest):
        fence.check("an atomic", pointers.data, True, expected.data.itemsize)
        return atomics["cas"](pointers, expected, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", call)
        patch.setattr(torch, "empty_like", lambda *args, **options: fence.allow(plain_like(*args, **options)))
        if follows_addresses:
            patch.setattr(torch.Tensor, "data_ptr", lambda tensor: _address_of(fence.allow(tensor)))
        for name, watched in (("masked_load", load), ("masked_store", store), ("atomic_rmw", rmw), ("atomic_cas", cas)):
            patch.setattr(interpreter_builder, f"create_{name}", watched, raising=False)
        yield fence
