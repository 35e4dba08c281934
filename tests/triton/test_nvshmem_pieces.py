"""What crosses between domains of GPUs in pieces, beside other work: the same bits, in order, and early."""

import functools
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from nvshmem_ranks import OwnDevice, opened, run

from moecomm import Communicator
from moecomm.algorithms import passage
from moecomm.algorithms.calls import LANE_ANSWERED, LANE_CROSSED, LANE_DONE, PIECES
from moecomm.algorithms.device_hierarchical_dispatch import DeviceHierarchicalDispatch
from moecomm.devices.wire_queue import WireQueue
from moecomm.kernels.far_runs import FarRun, Memory
from moecomm.testing import masked
from moecomm.testing.contracts.cases import random_rows

# Of each, a part has shares in all pieces.
TOKENS = 90
SIZES = {"num_experts": 6, "hidden": 24, "num_topk": 3, "max_tokens_per_rank": TOKENS}


class CountsPushes(WireQueue):
    """Knows how often it has signalled, and put beside."""

    def __init__(self, *args):
        self.pushes = Counter()  # by lane; and None: to one rank alone
        super().__init__(*args)

    def _launch(self, memory, runs, lane, *, to=None, **options):
        self.pushes[None] += to is not None
        super()._launch(memory, runs, lane, to=to, **options)

    def _push(self, memory, runs, lane, n):
        self.pushes[lane] += 1
        super()._push(memory, runs, lane, n)


class LatePieces(CountsPushes):
    """Takes its time before the last one, in the first two calls."""

    delay = 0.3

    def _push(self, memory, runs, lane, n):
        if lane == LANE_CROSSED and self.pushes[lane] in (PIECES - 1, 2 * PIECES - 1):
            time.sleep(self.delay)
        super()._push(memory, runs, lane, n)


class WaitsForFirstPiece(LatePieces):
    """Takes all pieces when the first has come."""

    delay = 3

    def _wait(self, lane, sequence, awaited=None):
        super()._wait(lane, sequence - sequence % PIECES if lane == LANE_CROSSED else sequence, awaited)


class LateAnswers(CountsPushes):
    """Takes its time before the last piece of the first answers."""

    delay = 0.3

    def _launch(self, memory, runs, lane, *, to=None, **options):
        if to is not None and self.pushes[None] == PIECES - 1:
            time.sleep(self.delay)
        super()._launch(memory, runs, lane, to=to, **options)


class TellsWithFirstPiece(LateAnswers):
    """Says that it has answered when it has put the first piece."""

    delay = 3

    def put_beside(self, rank, memory, runs, told=None):
        super().put_beside(rank, memory, runs, told or (LANE_ANSWERED, 1))  # the number of the combine


def cut_all(fn):
    """A function of ranks that puts however little in pieces."""

    @functools.wraps(fn)
    def cutting(*args):
        least, passage._LEAST_CUT = passage._LEAST_CUT, 0
        try:
            return fn(*args)
        finally:
            passage._LEAST_CUT = least

    return cutting


def dispatches(comm, options, blank=lambda: None):
    """What two dispatches give, the second with the handle of the first."""
    ids = masked(TOKENS, 6, 3, seed=comm.rank)
    weights = torch.rand(TOKENS, 3, generator=torch.Generator().manual_seed(comm.rank))
    found, handle = [], None
    for step in range(2):
        x = random_rows((TOKENS, 24), torch.float32, f"{step} {comm.rank}")
        blank()
        received = comm.dispatch(
            x, ids if handle is None else None, weights, handle=handle, **(options if handle is None else {})
        )
        handle = received.handle
        found += [received.x.clone(), received.topk_weights.clone()]
        del received
    return found


def sums(comm, options, blank=lambda: None, *, reduce="per_host"):
    """What a combine gives, and its gradients, for which values come home."""
    ids = masked(TOKENS, 6, 3, seed=comm.rank)
    received = comm.dispatch(torch.zeros(TOKENS, 24), ids, **options)
    y = random_rows(tuple(received.x.shape), torch.float32, f"y {comm.rank}").requires_grad_()
    scale = torch.rand(TOKENS, 3, generator=torch.Generator().manual_seed(comm.rank)).requires_grad_()
    blank()
    home = comm.combine(y, received.handle, None if "layout" in options else scale, reduce=reduce)
    home.square().sum().backward()
    return [one.detach().clone() for one in (home, y.grad, *(() if "layout" in options else (scale.grad,)))]


@cut_all
def in_pieces(group, queue_class, calls, options):
    """Signals by lane, and what is right; before a call all receive memory is -1, experts that nobody chose."""
    device = OwnDevice(group, 0.01 * group.rank, queue_class=queue_class)
    with opened(group, device, algorithm="hierarchical", **SIZES) as comm:
        region = comm._exchanger.session.memory.region
        memory = device.bytes_at(region.address, region.nbytes, None)

        def blank():
            group.all_gather(None)
            memory.fill_(0xFF)
            group.all_gather(None)

        got, topology = calls(comm, options, blank), comm.topology
        pushes = comm._exchanger.session.queue.pushes
    device.end()
    with Communicator(group, **SIZES, topology=topology) as comm:
        wanted = calls(comm, options)
    return pushes, [torch.equal(*pair) for pair in zip(got, wanted, strict=True)]


@pytest.mark.parametrize(("num_ranks", "options"), [(2, {}), (3, {"layout": "flat"})])
def test_dispatches_in_pieces_of_one_part_and_of_several_are_the_native_bits(num_ranks, options):
    for pushes, are_right in run(in_pieces, num_ranks, 1, CountsPushes, dispatches, options):
        assert pushes[LANE_CROSSED] == 2 * PIECES
        assert all(are_right)


@pytest.mark.parametrize("reduce", ["per_host", "exact"])
@pytest.mark.parametrize(("num_ranks", "options"), [(2, {}), (3, {"layout": "flat"})])
def test_sums_in_pieces_are_the_native_bits(num_ranks, options, reduce):
    calls = functools.partial(sums, reduce=reduce)
    for pushes, are_right in run(in_pieces, num_ranks, 1, CountsPushes, calls, options):
        assert pushes[LANE_CROSSED] == 2 * PIECES  # of the dispatch that brings gradients, too
        assert pushes[None] >= PIECES
        assert all(are_right)


@pytest.mark.parametrize(
    ("calls", "sound", "mistaken"),
    [(dispatches, LatePieces, WaitsForFirstPiece), (sums, LateAnswers, TellsWithFirstPiece)],
)
def test_who_takes_pieces_before_the_last_has_come_takes_what_is_not_there(calls, sound, mistaken):
    for queue_class in (sound, mistaken):
        for _, are_right in run(in_pieces, 2, 1, queue_class, calls, {}):
            assert are_right[0] == (queue_class is sound)


# -- beside other work -------------------------------------------------------------------------------------------------


class HoldsBack(CountsPushes):
    """Puts the first piece when its rank has written what stays in its domain, the last when all have passed one on."""

    flags = ()

    def _push(self, memory, runs, lane, n):
        if lane == LANE_CROSSED:
            _until_there(self.flags[: {0: 1, PIECES - 1: None}.get(self.pushes[lane], 0)])
        super()._push(memory, runs, lane, n)


def _until_there(flags):
    deadline = time.monotonic() + 20
    while not all(flag.exists() for flag in flags):
        assert time.monotonic() < deadline, f"not there: {[flag.name for flag in flags if not flag.exists()]}"
        time.sleep(1e-3)


def _then_raise(flag, step):
    def work(*args):
        step(*args)
        flag.touch()

    return work


@cut_all
def held_back(group, folder):
    near = Path(folder, f"near {group.rank}")
    passed_on = [Path(folder, f"passed on {rank}") for rank in range(group.size)]
    device = OwnDevice(group, queue_class=HoldsBack)
    steps = DeviceHierarchicalDispatch._write_near, DeviceHierarchicalDispatch._forward_share
    with opened(group, device, algorithm="hierarchical", **SIZES) as comm:
        comm._exchanger.session.queue.flags = (near, *passed_on)
        DeviceHierarchicalDispatch._write_near = _then_raise(near, steps[0])
        DeviceHierarchicalDispatch._forward_share = _then_raise(passed_on[group.rank], steps[1])
        try:
            received = comm.dispatch(torch.zeros(TOKENS, 24), masked(TOKENS, 6, 3, seed=comm.rank))
            num_rows = received.num_tokens_per_expert.sum().item()
        finally:
            DeviceHierarchicalDispatch._write_near, DeviceHierarchicalDispatch._forward_share = steps
        del received
    device.end()
    return num_rows


def test_near_rows_are_written_and_first_rows_passed_on_before_the_last_have_been_put(tmp_path):
    expected = sum(masked(TOKENS, 6, 3, seed=rank).ge(0).sum().item() for rank in range(2))
    assert sum(run(held_back, 2, 1, str(tmp_path))) == expected


class LateBeside(WireQueue):
    """Begins late with what runs beside."""

    def _push(self, memory, runs, lane, n):
        time.sleep(0.3 * bool(runs))
        super()._push(memory, runs, lane, n)


class NeverJoins(LateBeside):
    """Forgets what runs beside."""

    def _join(self):
        """Nothing is waited for."""


def beside(group, queue_class):
    """What lies in receive memory when a signal has come that followed the one of puts beside."""
    device = OwnDevice(group, queue_class=queue_class)
    with opened(group, device) as comm:
        queue, region = comm._exchanger.session.queue, comm._exchanger.session.memory.region
        memory, other = device.bytes_at(region.address, region.nbytes, None), 1 - group.rank
        memory[:64] = 7
        queue.put(Memory(region.address, region.nbytes), [FarRun(other, 1024, 0, 64)], beside=True)
        queue.signal_all(LANE_CROSSED, 0)
        queue.signal_all(LANE_DONE, 0)
        queue.wait(LANE_DONE, 0)
        found = queue.ask(memory[1024:1088].tolist)
        queue._beside.synchronize()
        group.all_gather(None)
    device.end()
    return found


@pytest.mark.parametrize(("queue_class", "found"), [(LateBeside, 7), (NeverJoins, 0xFF)])
def test_the_next_signal_comes_behind_what_is_put_beside(queue_class, found):
    assert run(beside, 2, 1, queue_class) == [[found] * 64] * 2
