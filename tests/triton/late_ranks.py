"""Ranks on the stand-in device: every kind of call, beside the same on the native kernels; and queues with mistakes."""

from datetime import timedelta

import torch
from late_device import LateDevice, LateStream
from torch.utils._python_dispatch import TorchDispatchMode

from moecomm import Communicator
from moecomm.algorithms.calls import LANE_DONE, LANE_GRANTED
from moecomm.devices.base import DeviceIdentity
from moecomm.devices.device_queue import DeviceQueue
from moecomm.testing import masked, with_duplicates
from moecomm.testing.compare import assert_bitwise_equal
from moecomm.testing.contracts.cases import random_rows

TOKENS = {1: (5,), 2: (5, 3), 3: (4, 0, 5), 4: (3, 0, 5, 2)}
SIZES = {"num_experts": 6, "hidden": 24, "num_topk": 3, "max_tokens_per_rank": 8, "timeout": timedelta(seconds=30)}
# Until who does not come is given up: longer than a busy machine takes to interpret the kernels of those that do.
GIVE_UP = timedelta(seconds=10)


THROUGHPUT = {"expert_major": {"expert_alignment": 4}, "flat": {"layout": "flat"}, "plain": {}}
CAPACITY = {"fixed": {"expert_alignment": 4, "capacity": 61}, "fixed flat": {"layout": "flat", "capacity": 40}}
LOW_LATENCY = {
    "slab": {"mode": "low_latency"},
    "grouped": {"mode": "low_latency", "layout": "expert_major", "expert_alignment": 2},
}


class Looking(TorchDispatchMode):
    """Looks at torch operators, as selective checkpointing does."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def exchange(comm, dtype, kinds):
    """One of each kind of call; what they gave, by name."""
    found = {}
    rank, num_tokens = comm.rank, TOKENS[comm.num_ranks][comm.rank]
    x = random_rows((num_tokens, 24), dtype, f"x {rank}").to(comm.device)
    ids = (masked if rank % 2 else with_duplicates)(num_tokens, 6, 3, seed=rank)
    weights = torch.rand(num_tokens, 3, generator=torch.Generator().manual_seed(rank)).masked_fill(ids < 0, 0)
    ids, weights = ids.to(comm.device), weights.to(comm.device)

    def keep(what, **tensors):
        for name, tensor in tensors.items():
            found[f"{what}: {name}"] = None if tensor is None else tensor.detach().cpu().clone()

    for what, options in kinds.items():
        if what == "slab":  # which has no room for duplicates
            ids = masked(num_tokens, 6, 3, seed=rank).to(comm.device)
        received = comm.dispatch(x, ids, weights, **options)
        names = ("x", "topk_weights", "topk_idx", "num_tokens_per_expert", "offsets")
        keep(what, **{name: getattr(received, name) for name in names}, routes=received.handle.routes)
        keep(what, fingerprint=received.handle.stamp[1])
        again = comm.dispatch_async(x + 1, None, weights, handle=received.handle).wait()
        keep(f"{what} again", x=again.x, topk_weights=again.topk_weights)
        y = random_rows(tuple(received.x.shape), dtype, f"y {rank} {what}").to(comm.device)
        keep(what, home=comm.combine(y, received.handle), came=comm.combine(received.x, received.handle))
        buffer = comm.combine_buffer(received.handle, dtype)
        keep(what, buffered=comm.combine_async(buffer.copy_(y), received.handle).wait())
        if options.get("layout") != "flat":
            keep(what, weighted=comm.combine(y, received.handle, weights))
        leaf, scale = x.clone().requires_grad_(), weights.clone().requires_grad_()
        received = comm.dispatch(leaf, ids, scale, **options)
        home = comm.combine(received.x * 2, received.handle, None if options.get("layout") == "flat" else scale)
        (home.float().sum() + received.topk_weights.sum()).backward()
        keep(f"{what} backward", x=leaf.grad, weights=scale.grad)
    found["tokens"] = comm.tokens_per_expert.clone()
    return found


def compare(group, transport, dtype, kinds):
    """The same calls on the stand-in device and on the native kernels give the same bits."""
    identity = DeviceIdentity("late", ("late",)) if transport == "local" else DeviceIdentity(str(group.rank), _NAMES)
    device = LateDevice(delay=5e-4 * group.rank, identity=identity)
    got = on_device(group, transport, device, dtype, kinds)
    device.end()
    compare_with_native(group, got, dtype, kinds)


def on_device(group, transport, device, dtype, kinds):
    with Communicator(group, **SIZES, transport=transport, device=device, memory_limit=1 << 21) as comm:
        assert comm.transport_name == ("local" if transport == "auto" else transport)
        return exchange(comm, dtype, kinds)


def compare_with_native(group, got, dtype, kinds):
    with Communicator(group, **SIZES) as comm:
        wanted = exchange(comm, dtype, kinds)
    assert got.keys() == wanted.keys()
    for what, want in wanted.items():
        if want is None:
            assert got[what] is None, what
        else:
            assert_bitwise_equal(got[what], want, f"rank {group.rank}: {what}")


_NAMES = ("0", "1", "2")


# -- callers with streams of their own, and queues with mistakes -------------------------------------------------------


class NotAfterTheCaller(DeviceQueue):
    """Begins at once, whatever the caller's stream has still to do."""

    def begin(self, call, prepare):
        stream, self._stream = self._stream, _Deaf(self._stream)
        try:
            super().begin(call, prepare)
        finally:
            self._stream = stream


class NotHandedOver(DeviceQueue):
    """Lets the caller's stream go on at once."""

    def hand_over(self, call):
        """Nothing is waited for."""


class NotAfterTheSenders(DeviceQueue):
    """Does not wait until the peers' devices have written."""

    def wait(self, lane, sequence):
        if lane != LANE_DONE:
            super().wait(lane, sequence)


class NotAfterTheGrant(DeviceQueue):
    """Writes to memory that the peer's streams may still be reading."""

    def wait(self, lane, sequence):
        if lane != LANE_GRANTED:
            super().wait(lane, sequence)


class NotAfterTheReaders(DeviceQueue):
    """Grants memory that this rank's streams may still be reading."""

    def claim(self, block):
        """Nothing is waited for."""


class _Deaf:
    """A stream that waits for no event."""

    def __init__(self, stream):
        self._stream = stream

    def wait(self, event):
        """Nothing is waited for."""

    def __getattr__(self, name):
        return getattr(self._stream, name)


def caller_on_a_stream(group, queue_class, caller_delays, delays):
    """Whether two exchanges whose inputs come late and whose results are read late give what they should.

    Memory that dies is read to the end, as by kernels that were launched before.

    Arguments:
        caller_delays: of the callers' streams, by rank, in seconds per piece of work.
        delays: of the communicators' streams.
    """
    device = LateDevice(delays[group.rank], queue_class)
    caller = LateStream(device.failures, caller_delays[group.rank])
    num_tokens, seen, wanted, is_right = 4, [], [], True

    def read(tensor, is_owned=False):
        """What a kernel of the caller's finds in a tensor, of which it knows only the address unless it owns it."""
        copy = torch.full_like(tensor, float("nan"))
        found = tensor if is_owned else device.view(tensor.data_ptr(), None, tensor.dtype, tensor.shape)
        caller.submit(lambda: copy.copy_(found))
        return copy

    with Communicator(group, **SIZES, transport="local", device=device) as comm, device.using(caller):
        received = None
        for step in range(3):
            rows = random_rows((num_tokens, 24), torch.float32, f"{step} {group.rank}")
            chosen = masked(num_tokens, 6, 3, seed=10 * step + group.rank)
            x, ids = torch.full_like(rows, float("nan")), torch.full_like(chosen, -1)
            caller.submit(lambda x=x, ids=ids, rows=rows, chosen=chosen: (x.copy_(rows), ids.copy_(chosen)))
            work = comm.dispatch_async(x, ids)
            if received is not None:
                seen.append(read(received.x))
            del received  # its memory is granted again, in `wait`
            received = work.wait()
            seen.append(read(received.x))
            wanted.append((rows, chosen))
            seen.append(read(comm.combine(received.x, received.handle), is_owned=True))
        seen.append(read(received.x))
        caller.synchronize()
        del received
    caller.end()
    device.end()
    with Communicator(group, **SIZES) as comm:
        for rows, chosen in wanted:
            received = comm.dispatch(rows, chosen)
            expected = (received.x, comm.combine(received.x, received.handle), received.x)
            got = (seen.pop(0), seen.pop(0), seen.pop(0))
            matches = [torch.equal(*pair) for pair in zip(got, expected, strict=True)]
            is_right = is_right and all(matches)
    return is_right
