"""One rank is late with what crosses between domains of GPUs: what others send goes on meanwhile. Nothing is timed."""

import contextlib
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from late_ranks import GIVE_UP
from nvshmem_ranks import OwnDevice, opened, run

from moecomm import PeerFailed, PeerTimeout
from moecomm.algorithms.calls import LANE_ANSWERED, LANE_BEGUN, LANE_CROSSED, LANE_DONE, LANE_GRANTED
from moecomm.algorithms.device_hierarchical_combine import DeviceHierarchicalCombine
from moecomm.algorithms.device_hierarchical_dispatch import DeviceHierarchicalDispatch
from moecomm.devices.wire_queue import WireQueue

# Three domains of a rank each, which is the rail of both others; the late one is the first in the list of rank 0.
LATE = 2
SIZES = {"num_experts": 6, "hidden": 24, "num_topk": 6, "max_tokens_per_rank": 8, "timeout": timedelta(seconds=40)}


class Flags:
    """What ranks have done, for all to see."""

    def __init__(self, folder, rank):
        self.folder, self.rank = Path(folder), rank

    def raise_one(self, what):
        (self.folder / f"{self.rank} {what}").touch()

    def wait(self, *names):
        deadline = time.monotonic() + 30
        while missing := [name for name in names if not (self.folder / name).exists()]:
            assert time.monotonic() < deadline, f"not there: {missing}"
            time.sleep(1e-3)


class Held(WireQueue):
    """Says what it has done, and holds back its next signal on a lane until others have done something."""

    flags = None  # nothing is signalled before there are some
    held = None  # the lane, and what is waited for

    def __init__(self, *args):
        self.signals = Counter()  # by lane
        super().__init__(*args)

    def _launch(self, memory, runs, lane, *, to=None, **options):
        if self.held is not None and self.held[0] == lane:
            (_, names), self.held = self.held, None
            self.flags.wait(*names)
        super()._launch(memory, runs, lane, to=to, **options)
        if to is not None:
            self.flags.raise_one(f"has answered {to}")
        else:
            self.signals[lane] += 1
            self.flags.raise_one(f"has signalled {lane} {self.signals[lane]} times")

    def wait_for(self, ranks, lane, sequence):
        super().wait_for(ranks, lane, sequence)
        if lane == LANE_ANSWERED:
            self.run(lambda: self.flags.raise_one("has its answers"))


def before(owner, name, wait):
    """Patches a step: something is waited for before it."""
    step = getattr(owner, name)

    def late(*args):
        wait()
        return step(*args)

    return mock.patch.object(owner, name, late)


def telling(flags):
    """Patches the step of a rail: it says whose rows it has passed on."""
    step = DeviceHierarchicalDispatch._forward_share

    def forward(dispatch, part, share):
        step(dispatch, part, share)
        flags.raise_one(f"has passed on {part.sender}")

    return mock.patch.object(DeviceHierarchicalDispatch, "_forward_share", forward)


def dispatch(comm):
    """A dispatch in which every token has all experts, and whether it is right."""
    ids = torch.arange(6).expand(4, 6).contiguous()
    received = comm.dispatch(rows_of(comm.rank), ids)
    wanted = torch.cat([rows_of(rank) for rank in range(comm.num_ranks)])
    return received, torch.equal(received.x, wanted.repeat(len(received.num_tokens_per_expert), 1))


def combine(comm, received, reduce):
    """Whether a combine brings home what the dispatch sent."""
    home = comm.combine(received.x, received.handle, reduce=reduce)
    return torch.equal(home, 6 * rows_of(comm.rank))


def rows_of(rank):
    return torch.arange(4 * 24, dtype=torch.float32).view(4, 24) + 100 * rank


# What is late: the step before which the host waits, and the lane on which its device does.
KINDS = {
    "dispatch begins": (DeviceHierarchicalDispatch, "", LANE_GRANTED),
    "combine begins": (DeviceHierarchicalCombine, "", LANE_BEGUN),
    "dispatch": (DeviceHierarchicalDispatch, "_look", LANE_CROSSED),
    "asks": (DeviceHierarchicalCombine, "_cards", LANE_GRANTED),
    "answers": (DeviceHierarchicalCombine, "_own_addresses", LANE_ANSWERED),
}


@contextlib.contextmanager
def held(kind, where, queue, names):
    """Within, this rank's host or its device is late until others have done something."""
    owner, step, lane = KINDS[kind]
    if where == "device":
        queue.held = (lane, names)
        yield
    else:
        with before(owner, step, lambda: queue.flags.wait(*names)):
            yield


def held_back(group, folder, late, kind, where, names, reduce="exact"):
    """Whether a dispatch and a combine are right in one of which a rank is late."""
    device = OwnDevice(group, queue_class=Held)
    with opened(group, device, algorithm="hierarchical", **SIZES) as comm:
        queue = comm._exchanger.session.queue
        queue.flags = Flags(folder, comm.rank)
        until_done = held(kind, where, queue, names) if comm.rank == late else contextlib.nullcontext()
        with telling(queue.flags):
            with until_done if "dispatch" in kind else contextlib.nullcontext():
                received, is_right = dispatch(comm)
            with contextlib.nullcontext() if "dispatch" in kind else until_done:
                is_home_right = combine(comm, received, reduce)
        del received
    device.end()
    return is_right, is_home_right


either_sum = pytest.mark.parametrize("reduce", ["per_host", "exact"])


@pytest.mark.parametrize(
    ("kind", "lane", "reduce"),
    [
        ("dispatch begins", LANE_CROSSED, "exact"),
        ("combine begins", LANE_GRANTED, "exact"),
        ("combine begins", LANE_GRANTED, "per_host"),
    ],
)
def test_a_device_begins_before_one_with_which_it_has_nothing_to_do(kind, lane, reduce, tmp_path):
    # Two domains of two: rank 0 writes to ranks 1 and 2, and reads of them, but not of rank 3.
    done = f"0 has signalled {lane} {1 if lane == LANE_CROSSED else 2} times"
    assert run(held_back, 4, 2, str(tmp_path), 3, kind, "device", [done], reduce) == [(True, True)] * 4


@pytest.mark.parametrize("where", ["device", "host"])
def test_a_rail_passes_on_what_others_send_before_a_late_rank_sends(where, tmp_path):
    names = ("0 has passed on 1", "1 has passed on 0")
    assert run(held_back, 3, 1, str(tmp_path), LATE, "dispatch", where, names) == [(True, True)] * 3


@either_sum
@pytest.mark.parametrize("where", ["device", "host"])
def test_a_rail_answers_others_before_a_late_rank_asks(where, reduce, tmp_path):
    names = ("0 has answered 1", "1 has answered 0")
    assert run(held_back, 3, 1, str(tmp_path), LATE, "asks", where, names, reduce) == [(True, True)] * 3


@either_sum
@pytest.mark.parametrize("where", ["device", "host"])
def test_who_shares_a_rail_with_a_late_rank_has_its_answers_before(where, reduce, tmp_path):
    # Domains of one rank and of two: rank 0 is the rail of both others.
    answers = run(held_back, 3, 2, str(tmp_path), LATE, "asks", where, ["1 has its answers"], reduce)
    assert answers == [(True, True)] * 3


@either_sum
def test_whoever_has_the_answers_of_its_rails_waits_for_no_other(reduce, tmp_path):
    # Two domains of two: rank 3 is the rail of rank 1 alone.
    names = ("0 has its answers", "2 has its answers")
    assert run(held_back, 4, 2, str(tmp_path), 3, "answers", "device", names, reduce) == [(True, True)] * 4


def arrives(group, folder):
    """Whether rows are right where rank 3, which sends none to the other domain, does not end before they are used."""
    flags, device = Flags(folder, group.rank), OwnDevice(group, queue_class=Held)
    with opened(group, device, algorithm="hierarchical", **SIZES) as comm:
        queue = comm._exchanger.session.queue
        queue.flags = flags
        if comm.rank == 3:
            queue.held = (LANE_DONE, ["0 has its rows", "1 has its rows"])
        ids = torch.arange(6) if comm.rank < 3 else torch.tensor([4, 5, -1, -1, -1, -1])  # of ranks 2 and 3
        received = comm.dispatch(rows_of(comm.rank), ids.expand(4, 6).contiguous())
        found = received.x.clone()
        flags.raise_one("has its rows")
        sources = range(3 if comm.rank < 2 else 4)
        wanted = torch.cat([rows_of(rank) for rank in sources]).repeat(len(received.num_tokens_per_expert), 1)
        del received
    device.end()
    return torch.equal(found, wanted)


def test_rows_are_there_before_a_device_of_another_domain_has_done_its_part(tmp_path):
    assert run(arrives, 4, 2, str(tmp_path)) == [True] * 4


# -- whose rows are read where they lie --------------------------------------------------------------------------------


class BeginsAtOnce(Held):
    """Takes its neighbours' rows as they are; says that it has done all of a call but waited for the end."""

    def wait_for(self, ranks, lane, sequence):
        if lane == LANE_DONE:
            self.run(lambda: self.flags.raise_one(f"has done call {sequence}"))
        if lane != LANE_BEGUN:
            super().wait_for(ranks, lane, sequence)


def late_with_rows(group, folder, queue_class, reduce):
    """Whether a combine is right where a device is late with its rows."""
    device = OwnDevice(group, queue_class=queue_class)
    with opened(group, device, algorithm="hierarchical", **SIZES) as comm:
        queue, region = comm._exchanger.session.queue, comm._exchanger.session.memory.region
        queue.flags = Flags(folder, comm.rank)
        received, _ = dispatch(comm)
        y, handle = received.x + 1, received.handle
        del received
        group.all_gather(None)
        device.bytes_at(region.address, region.nbytes, None).fill_(0xFF)
        group.all_gather(None)
        if comm.rank == LATE:
            wait = (lambda: time.sleep(0.2)) if queue_class is Held else lambda: queue.flags.wait("1 has done call 1")
            queue.run(wait)
        home = comm.combine(y, handle, reduce=reduce)
        is_right = torch.equal(home, 6 * (rows_of(comm.rank) + 1))
    device.end()
    return is_right


@either_sum
@pytest.mark.parametrize("queue_class", [Held, BeginsAtOnce])
def test_rows_of_neighbours_are_read_when_their_devices_have_begun(queue_class, reduce, tmp_path):
    # Domains of one rank and of two: rank 1 reads rows of rank 2, for itself and for rank 0.
    is_sound = queue_class is Held
    assert run(late_with_rows, 3, 2, str(tmp_path), queue_class, reduce) == [is_sound, is_sound, True]


# -- who is later than the deadline ------------------------------------------------------------------------------------


def beyond_the_deadline(group, folder):
    """Who is named, by whom; and whether the next calls are right."""
    flags, device = Flags(folder, group.rank), OwnDevice(group)
    with opened(group, device, algorithm="hierarchical", **SIZES | {"timeout": GIVE_UP}) as comm:
        received, *is_right = dispatch(comm)
        is_right.append(combine(comm, received, "exact"))
        others = [f"{rank} has given up" for rank in range(2)]
        wait = (lambda: flags.wait(*others)) if comm.rank == LATE else (lambda: None)
        with before(DeviceHierarchicalDispatch, "_look", wait), pytest.raises((PeerTimeout, PeerFailed)) as caught:
            dispatch(comm)
        flags.raise_one("has given up")
        group.all_gather(None)
        received, is_still_right = dispatch(comm)
        is_right += [is_still_right, combine(comm, received, "per_host")]
        del received
    device.end()
    return type(caught.value), caught.value.peers, str(caught.value), is_right


def test_a_source_that_is_too_late_is_named_and_the_next_calls_are_right(tmp_path):
    *others, late = run(beyond_the_deadline, 3, 1, str(tmp_path))
    assert [peers for _, peers, *_ in others] == [(LATE,)] * 2
    assert any(kind is PeerTimeout and "nothing came from rank 2" in text for kind, _, text, _ in others)
    assert late[0] is PeerFailed
    assert [is_right for *_, is_right in (*others, late)] == [[True] * 4] * 3
