"""The low-latency path never looks at values from Python, and no shape in it depends on them: what it takes to be
captured in a graph of a device.
"""

import dataclasses

import pytest
import torch
from exchange_ranks import open_communicator
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import moecomm.communicator as communicator
from moecomm.testing import launch, masked, no_routes, uniform

HIDDEN, EXPERTS, TOPK, MOST = 16, 6, 2, 8
# All that the path may ask of torch: memory of shapes that are known, and views of it.
ALLOWED = {
    "empty.memory_format",
    "empty_like.default",
    "resize_.default",
    "view.default",
    "detach.default",
    "lift_fresh.default",
}
LOOKS = ("item", "tolist", "numpy", "__int__", "__bool__", "__float__", "__index__", "__len__", "__iter__", "nonzero")


class Watch(TorchDispatchMode):
    """Notes every operator that runs."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func.__name__)
        return func(*args, **(kwargs or {}))


def shapes_of(*results):
    """The shape of every tensor that a call has given, handles included."""
    shapes = []
    for result in results:
        if isinstance(result, torch.Tensor):
            shapes.append((tuple(result.shape), result.dtype))
        elif dataclasses.is_dataclass(result):
            shapes += [(field.name, *shapes_of(getattr(result, field.name))) for field in dataclasses.fields(result)]
    return shapes


def exchange(comm, x, idx, weights, layout):
    """All that a step of inference does: dispatch, experts that write where peers read, combine; also with a handle."""
    received = comm.dispatch(x, idx, weights, mode="low_latency", layout=layout)
    buffer = comm.combine_buffer(received.handle, x.dtype)
    work = comm.combine_async(buffer, received.handle, weights)
    while not work.done():
        pass
    again = comm.dispatch_async(x, handle=received.handle).wait()
    out = comm.combine(again.x, again.handle)
    return shapes_of(received, buffer, work.wait(), again, out)


def inputs(routing, num_tokens, seed):
    x = torch.ones(num_tokens, HIDDEN, dtype=torch.bfloat16)
    return x, routing(num_tokens, EXPERTS, TOPK, seed=seed), torch.ones(num_tokens, TOPK)


def watch(group, layout, monkeypatch):
    """Rank 0 looks at all that happens. The shapes that each rank has seen, for several routings."""
    seen = []
    with torch.no_grad(), open_communicator(group, max_tokens_per_rank=MOST) as comm:
        for routing in (uniform, masked, no_routes):
            seen.append(exchange(comm, *inputs(routing, 5, group.rank), layout))
        batch = inputs(uniform, 5 if group.rank == 0 else 2, 7)  # how many tokens the others have is no matter either
        if group.rank > 0:
            exchange(comm, *batch, layout)
            return seen
        # The operators would be taken where something looks at them; what is looked at here is the way past them.
        monkeypatch.setattr(communicator, "is_traced", lambda: False)
        with Watch() as mode:
            forbid_looks(monkeypatch)
            seen.append(exchange(comm, *batch, layout))
            monkeypatch.undo()
        assert set(mode.operators) <= ALLOWED, set(mode.operators) - ALLOWED
        assert "empty.memory_format" in mode.operators
    return seen


def forbid_looks(monkeypatch):
    for name in LOOKS:

        def look(self, *arguments, name=name):
            raise AssertionError(f"Tensor.{name} was called")

        monkeypatch.setattr(torch.Tensor, name, look)


@pytest.mark.parametrize("layout", ["slab", "expert_major"])
def test_nobody_looks_at_values_and_shapes_depend_on_the_arguments_alone(layout, monkeypatch):
    for seen in launch(watch, 2, layout, monkeypatch):
        assert len(seen) >= 3
        assert all(shapes == seen[0] for shapes in seen)


def test_shapes_are_known_before_anything_runs():
    with open_communicator(None, max_tokens_per_rank=MOST) as comm:
        x, idx, weights = torch.ones(5, HIDDEN), uniform(5, EXPERTS, TOPK), torch.ones(5, TOPK)

        def step(x, idx, weights):
            received = comm.dispatch(x, idx, weights, mode="low_latency")
            return received, comm.combine(received.x, received.handle, weights)

        real = shapes_of(*step(x, idx, weights))
        with FakeTensorMode() as mode:
            fake = step(*(mode.from_tensor(tensor) for tensor in (x, idx, weights)))
        assert shapes_of(*fake) == real
        assert all(isinstance(size, int) for size in fake[0].x.shape)
