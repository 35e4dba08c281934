"""What goes wrong on a device that does its work late: ranks stay in step, tensors live long enough, waits end."""

import gc
import weakref

import pytest
import torch
from late_device import LateDevice, LateEvent, LateStream, PromptStream
from late_ranks import GIVE_UP, SIZES

from moecomm import Communicator, CommunicatorClosed, MemoryLimitExceeded, PeerFailed, PeerLost, PeerTimeout
from moecomm.algorithms.calls import LANE_DONE
from moecomm.devices.device_queue import DeviceQueue
from moecomm.testing import launch, uniform


def rows_of(rank, num_tokens=4):
    return torch.full((num_tokens, 24), float(rank + 1)), uniform(num_tokens, 6, 3, seed=rank)


def check_pair(comm):
    """A dispatch and a combine that bring back three times what was sent."""
    x, ids = rows_of(comm.rank)
    received = comm.dispatch(x, ids)
    home = comm.combine(received.x, received.handle)
    comm._exchanger.session.device.current_stream().synchronize()
    assert torch.equal(home, 3 * x)


def refuse_and_go_on(group):
    device = LateDevice(1e-3 * group.rank)
    with Communicator(group, **SIZES, transport="local", device=device, memory_limit=1 << 14) as comm:
        check_pair(comm)
        x, ids = rows_of(comm.rank)
        if comm.rank == 1:
            ids[2, 1] = 6
        with pytest.raises((ValueError, PeerFailed), match=r"topk_idx\[2, 1\] = 6 is not an expert"):
            comm.dispatch(x, ids)
        check_pair(comm)
        with pytest.raises(MemoryLimitExceeded, match="memory_limit of 16384 bytes"):
            comm.dispatch(*rows_of(comm.rank, 200))
        check_pair(comm)
        received = comm.dispatch(x, ids.clamp(max=5))
        too_many = received.x.new_zeros(received.x.shape[0] + comm.rank, 24)
        with pytest.raises((ValueError, PeerFailed), match="rows, the dispatch of this handle brought"):
            comm.combine(too_many, received.handle)
        del received
        for _ in range(3):
            check_pair(comm)
        assert comm.trim() == 0  # nothing is given back of a device's memory
        assert comm.stats["receive_bytes_alive"] == 0
    device.end()


def test_refused_calls_leave_the_devices_in_step():
    launch(refuse_and_go_on, 2, timeout=100)


def lack_room(group):
    device = LateDevice()
    with Communicator(group, **SIZES, transport="local", device=device) as comm:
        check_pair(comm)
        queue = comm._exchanger.session.queue
        if comm.rank == 1:
            queue.room = no_room
        with pytest.raises((MemoryError, PeerFailed), match="there is no room"):
            comm.dispatch(*rows_of(comm.rank))
        vars(queue).pop("room", None)
        check_pair(comm)
    device.end()


def no_room(call, shape, dtype):
    raise MemoryError("there is no room")


def test_a_device_without_room_for_results_refuses_the_call_and_stays_in_step():
    launch(lack_room, 2, timeout=100)


def lack_room_for_what_kernels_make(group):
    device = LateDevice()
    sizes = {**SIZES, "timeout": GIVE_UP}
    with Communicator(group, **sizes, transport="local", device=device) as comm:
        x, ids = rows_of(comm.rank)
        if comm.rank == 0:  # first, so that it does not know yet
            comm.dispatch_async(x, ids, mode="low_latency")
        group.all_gather(None)
        if comm.rank == 1:
            comm._exchanger.session.queue.room = no_room
            with pytest.raises(MemoryError, match="there is no room"):
                comm.dispatch(x, ids, mode="low_latency")
        group.all_gather(None)
        with pytest.raises(PeerFailed, match="rank 1 .* has refused low-latency dispatch #0: MemoryError"):
            comm.check()
    device.end()


def test_peers_learn_that_a_device_has_no_room_for_what_kernels_make():
    launch(lack_room_for_what_kernels_make, 2, timeout=100)


def lag_behind(group):
    """A device that is still summing a peer's rows when the peer, after calls that it has refused, sends others."""
    device = LateDevice(0.4 * group.rank)
    with Communicator(group, **SIZES, transport="local", device=device, memory_limit=1 << 21) as comm:
        x, ids = rows_of(comm.rank)
        # Autograd records the calls, so that the hosts count them.
        received = comm.dispatch(x.clone().requires_grad_(), ids, mode="low_latency")
        rows = received.x.detach().clone().requires_grad_()
        wrong = (x[:1] if comm.rank == 0 else rows.detach()).clone().requires_grad_()
        others = (rows * 5).detach().requires_grad_()
        caller = LateStream(device.failures)
        with device.using(caller):
            home = comm.combine(rows, received.handle)
            for _ in range(3):
                with pytest.raises((ValueError, PeerFailed), match="y has 1 rows"):
                    comm.combine(wrong, received.handle)
            works = [comm.combine_async(others, received.handle) for _ in range(2)]
            later = [work.wait() for work in works]
        caller.synchronize()
        assert torch.equal(home, 3 * x)
        assert all(torch.equal(one, 15 * x) for one in later)
    caller.end()
    device.end()


def test_memory_that_a_late_device_reads_is_not_written_to_after_failures():
    launch(lag_behind, 2, timeout=100)


class Silent(DeviceQueue):
    """Does its work; from call 2 on rank 1 tells nobody but itself."""

    def signal_all(self, lane, sequence):
        if self._rank == 1 and sequence == 2 and lane == LANE_DONE:
            self._boards = self._boards * torch.tensor([0, 1])
        super().signal_all(lane, sequence)


def wait_in_vain(group):
    device = LateDevice(queue_class=Silent)
    options = SIZES | {"timeout": GIVE_UP}
    with Communicator(group, **options, transport="local", device=device) as comm:
        check_pair(comm)
        x, ids = rows_of(comm.rank)
        with pytest.raises((PeerTimeout, PeerFailed), match=r"the device of rank 1: counter at 2, expected [34]"):
            [comm.dispatch(x, ids) for _ in range(3)]
        with pytest.raises((PeerTimeout, PeerFailed)):
            comm.dispatch(x, ids)
        group.all_gather(None)  # else whoever is slower would find that the other has closed


def test_a_device_that_is_stuck_ends_the_waits():
    launch(wait_in_vain, 2, timeout=100)


def leave_early(group):
    """Rank 1 goes before its device has done its part: as if its process had ended."""
    device = LateDevice(queue_class=Silent)
    with (
        device.using(LateStream(device.failures)),
        Communicator(group, **SIZES, transport="local", device=device) as comm,
    ):
        check_pair(comm)
        x, ids = rows_of(comm.rank)
        comm.dispatch(x, ids)  # rank 0's device waits; its host has been told all, and goes on
        if comm.rank == 0:
            with pytest.raises(PeerLost, match=r"waited for work of ranks 1"):
                comm.dispatch(x, ids)


def test_waits_for_a_rank_that_has_gone_end_soon():
    launch(leave_early, 2, timeout=25)  # a wait may take 30 s


class HoldingStream(PromptStream):
    """Launches at once, as CUDA does; what it is to be done with is held back."""

    def __init__(self, device):
        self.device = device

    def record(self):
        event = LateEvent()
        if self.device.holds:
            self.device.held.append(event)
        else:
            event.flag.set()
        return event

    def wait(self, event):
        """All this is about what lives, not about the order."""

    def is_same(self, other):
        return self is other


class HoldingDevice(LateDevice):
    def __init__(self):
        super().__init__()
        self.holds, self.held = False, []

    def new_stream(self, delay=None):
        return HoldingStream(self)

    def release(self):
        self.holds = False
        for event in self.held:
            event.flag.set()


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_tensors_live_until_the_work_is_done(is_waited_for):
    device = HoldingDevice()
    with device.using(HoldingStream(device)), Communicator(None, **SIZES, device=device) as comm:
        x, ids = rows_of(0)
        received = comm.dispatch(x, ids)
        y = torch.ones(12, 24)
        lives = weakref.ref(y)
        device.holds = True
        work = comm.combine_async(y, received.handle)
        del y
        while not work.done():
            work.step()
        result = work.wait() if is_waited_for else None
        written = weakref.ref(work._call.result.x)
        del work, result
        gc.collect()
        # Nobody has waited, so only the communicator knows that memory is still in use. Who has waited goes on behind
        # the work, and there torch's own rules hold.
        assert (lives() is None) == (written() is None) == is_waited_for
        device.release()
        comm.combine(received.x, received.handle)
        gc.collect()
        assert lives() is None
        assert written() is None


def test_tensors_of_another_device_are_refused():
    with Communicator(None, **SIZES, device=LateDevice()) as comm:
        x, ids = rows_of(0)
        with pytest.raises(TypeError, match="x is on meta, this communicator carries tensors on cpu"):
            comm.dispatch(x.to("meta"), ids)
        with pytest.raises(TypeError, match=r"topk_idx is on meta.*device='meta'"):
            comm.dispatch(x, ids.to("meta"))
        check_pair(comm)


def close_in_flight(group):
    """Calls that are in flight at the end, and tensors that outlive their communicator."""
    device = LateDevice(2e-3)
    comm = Communicator(group, **SIZES, transport="local", device=device)
    x, ids = rows_of(comm.rank)
    received = comm.dispatch(x, ids)
    expected = received.x.clone()
    work = comm.combine_async(received.x, received.handle)
    comm.close()
    with pytest.raises(CommunicatorClosed, match="was in flight when the communicator was closed"):
        work.wait()
    del work, comm
    gc.collect()
    assert torch.equal(received.x, expected)
    device.end()


def test_closing_waits_for_the_device_and_tensors_outlive_it():
    launch(close_in_flight, 2, timeout=20)


def test_low_latency_that_would_take_too_much_is_refused():
    options = SIZES | {"max_tokens_per_rank": 4096}
    with Communicator(None, **options, device=LateDevice(), memory_limit=1 << 16) as comm:
        x, ids = rows_of(0)
        with pytest.raises(ValueError, match="of cuda memory for windows of max_tokens_per_rank=4096 tokens"):
            comm.dispatch(x, ids, mode="low_latency")
        check_pair(comm)
