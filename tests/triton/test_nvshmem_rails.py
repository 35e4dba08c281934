"""Exchanges of CUDA tensors over rails, without a GPU: the native kernels' bits, and each token's row crosses once."""

import contextlib
import gc
import re
from unittest import mock

import pytest
import torch
from late_device import LateStream
from late_ranks import CAPACITY, GIVE_UP, SIZES, THROUGHPUT, TOKENS, Looking
from nvshmem_ranks import OwnDevice, compare, opened, run
from torch.utils.checkpoint import checkpoint

from moecomm import Communicator, MemoryLimitExceeded, PeerFailed, PeerTimeout
from moecomm.algorithms.calls import LANE_CROSSED
from moecomm.codecs.none import PlainRows
from moecomm.kernels.registry import wire_kernels_for
from moecomm.testing import with_duplicates
from moecomm.testing.compare import assert_bitwise_equal
from moecomm.testing.contracts.cases import random_rows

# Ranks, ranks per domain, the domains that are found; PEs count backwards. Rank 0 of "2+1" serves both others.
DOMAINS = {"2x1": (2, 1, (0, 1)), "2+1": (3, 2, (0, 1, 1)), "2x2": (4, 2, (0, 0, 1, 1))}


def between_domains(group, dtype, kinds):
    return compare(group, dtype, kinds, algorithm="hierarchical")


@pytest.mark.parametrize(
    ("domains", "kind"),
    [
        ("2x1", "plain"),
        *(("2+1", kind) for kind in ("flat", "fixed")),
        *(("2x2", kind) for kind in ("expert_major", "flat")),
    ],
)
def test_rows_over_rails_are_the_native_bits(domains, kind):
    num_ranks, per_domain, domain_of = DOMAINS[domains]
    dtype = (torch.bfloat16, torch.float32)[num_ranks % 2]
    kinds = {kind: (THROUGHPUT | CAPACITY)[kind]}
    answers = run(between_domains, num_ranks, per_domain, dtype, kinds, timeout=200)
    for found, explained, _, log in answers:
        assert found == domain_of
        assert "algorithm='hierarchical': over rails" in explained
        assert re.search("combine #[0-9]+: over rails, ", explained)
        # Nothing is under way any more when memory goes back, all of it.
        assert log[-9:] == ["quiet", *["free"] * 7, "finish"]
        assert log.count("allocate") == 7
    assert any(stats["bytes_forwarded"] > 0 for _, _, stats, _ in answers)


# -- a sum per domain --------------------------------------------------------------------------------------------------


def sums(comm, options):
    """What combines with a sum per domain give, and their gradients; and what is told of the last one."""
    rank, num_tokens = comm.rank, TOKENS[comm.num_ranks][comm.rank]
    ids = with_duplicates(num_tokens, 6, 3, seed=rank)
    weights = torch.rand(num_tokens, 3, generator=torch.Generator().manual_seed(rank)).masked_fill(ids < 0, 0)
    x = random_rows((num_tokens, 24), torch.float32, f"x {rank}").requires_grad_()
    scale = None if options.get("layout") == "flat" else weights.requires_grad_()
    received = comm.dispatch(x, ids, weights.detach(), **options)
    found = [comm.combine(received.x.detach(), received.handle, reduce="per_host")]
    buffer = comm.combine_buffer(received.handle, torch.bfloat16)
    buffer.copy_(random_rows(tuple(buffer.shape), torch.bfloat16, f"y {rank}"))
    found.append(comm.combine_async(buffer, received.handle, reduce="per_host").wait())
    home = comm.combine(received.x, received.handle, scale, reduce="per_host")
    explained = comm.explain()  # in the backward there are exact ones
    home.square().sum().backward()
    found += [home, x.grad, *(() if scale is None else (scale.grad,))]
    return [one.detach().cpu() for one in found], explained


def compare_sums(group, options):
    device = OwnDevice(group, 5e-4 * group.rank)
    with opened(group, device, algorithm="direct") as comm:
        (got, explained), topology = sums(comm, options), comm.topology
        gc.collect()
        assert comm.stats["receive_blocks_alive"] == 0
    device.end()
    with Communicator(group, **SIZES, topology=topology) as comm:
        wanted, _ = sums(comm, options)
    for place, pair in enumerate(zip(got, wanted, strict=True)):
        assert_bitwise_equal(*pair, f"rank {group.rank}: {place}")
    return explained


@pytest.mark.parametrize(("domains", "kind"), [("2x1", "plain"), ("2+1", "flat"), ("2x2", "expert_major")])
def test_sums_per_domain_are_the_native_bits(domains, kind):
    num_ranks, per_domain, _ = DOMAINS[domains]
    for explained in run(compare_sums, num_ranks, per_domain, THROUGHPUT[kind], timeout=200):
        assert "over rails as reduce='per_host' always goes" in explained


# -- which way, and what it takes --------------------------------------------------------------------------------------


def choose(group):
    """Bytes that a rank has put, and what was chosen, for calls that either way is better for."""
    device, found = OwnDevice(group), []
    with opened(group, device) as comm:
        x = torch.full((4, 24), float(comm.rank))
        for ids in ([[2, 3, 5]] if comm.rank == 0 else [[0, 1, 2]], [[4, -1, -1]], [[-1, -1, -1]]):
            before = comm.stats
            received = comm.dispatch(x, torch.tensor(ids).expand(4, 3).contiguous())
            after = comm.stats
            names = ("bytes_between_hosts", "bytes_forwarded")
            title = f"dispatch #{received.handle.origin}: "
            way = comm.explain().split(title)[1].split(",")[0]
            found.append((way, *(after[name] - before[name] for name in names)))
        with pytest.raises(PeerFailed if comm.rank else ValueError, match="6 is not an expert"):
            comm.dispatch(x, torch.tensor([[6 - comm.rank, 0, 1]]).expand(4, 3).contiguous())
        comm.combine(received.x, received.handle, reduce="per_host")
    device.end()
    return found


def choose_home(group):
    """The same of combines."""
    device, found = OwnDevice(group), []
    with opened(group, device) as comm:
        x = torch.full((4, 24), float(comm.rank + 1))
        for ids in ([[2, 3, 5]] if comm.rank == 0 else [[0, 1, 2]], [[4, -1, -1]]):
            received = comm.dispatch(x, torch.tensor(ids).expand(4, 3).contiguous())
            before = comm.stats["bytes_between_hosts"]
            home = comm.combine(received.x, received.handle)
            way = comm.explain().split("combine #")[1].split(": ")[1].split(",")[0]
            num_sent = sum(id >= 0 for id in ids[0])
            found.append((way, comm.stats["bytes_between_hosts"] - before, torch.equal(home, num_sent * x)))
    device.end()
    return found


def test_auto_brings_rows_home_the_way_of_fewer_bytes():
    """As below; of a request also 4 bytes that say whether a token's experts are all there."""
    answers = run(choose_home, 3, 2)
    asked = 64 + 64
    # Rank 0's tokens have one sum in the other domain; those of 1 and 2 have two rows each in that of rank 0.
    assert [one[0] for one in answers] == [
        ("over rails", asked + 2 * 8 * 96, True),
        ("over rails", asked + 4 * 96, True),
        ("over rails", asked, True),
    ]
    # One row each, and requests would come on top.
    assert [one[1] for one in answers] == [
        ("from rank to rank", 0, True),
        ("from rank to rank", 0, True),
        ("from rank to rank", 4 * 96, True),
    ]


def round_to_zero(group):
    """A sum that all rows of the other domain make, less than half of what float16 has next to 0."""
    device = OwnDevice(group)
    with opened(group, device, algorithm="hierarchical") as comm:
        ids = torch.tensor([[3, 4, 5]] if comm.rank == 0 else [[0, 2, -1]])
        received = comm.dispatch(torch.zeros(1, 24, dtype=torch.float16), ids)
        home = comm.combine(torch.full_like(received.x, 2.0**-24), received.handle, torch.full((1, 3), -0.1))
    device.end()
    return home.abs().max().item(), home.signbit().all().item()


def test_sums_come_as_they_are_with_the_sign_of_a_zero():
    assert run(round_to_zero, 2, 1) == [(0.0, True)] * 2


def rows_of_a_codec(group):
    """Rows that a codec has written go home as they are: rails could not add them up, nor home their sums to rows."""
    device = OwnDevice(group)
    with (
        mock.patch.object(PlainRows, "is_plain", False),
        opened(group, device, algorithm="hierarchical") as comm,
    ):
        x, ids = torch.full((1, 24), 2.0), torch.tensor([[3, 4, 5]] if comm.rank == 0 else [[0, 1, 2]])
        received = comm.dispatch(x, ids)
        with pytest.raises(ValueError, match="'per_host' adds up sums of other domains, which no codec has written"):
            comm.combine(received.x, received.handle, reduce="per_host")
        before = comm.stats["bytes_between_hosts"]
        assert torch.equal(comm.combine(received.x, received.handle), 3 * x)
        came = comm.stats["bytes_between_hosts"] - before
    device.end()
    return came


def test_rows_of_a_codec_come_home_from_rank_to_rank():
    assert run(rows_of_a_codec, 2, 1) == [3 * 96] * 2


def test_auto_takes_the_way_of_fewer_bytes():
    """Ranks 0 | 1, 2 of two experts each: rows of 96 bytes, ids of 12, in parts of whole 64 bytes."""
    answers = run(choose, 3, 2)
    part = 384 + 64  # four rows, and their ids
    # Three experts in the other domain: a row each over rails, three from rank to rank. Rank 0 is the rail of 1 and 2.
    assert [one[0] for one in answers] == [
        ("over rails", part, 2 * 384),
        ("over rails", part, 384),
        ("over rails", part, 0),
    ]
    # One expert of rank 2: ids would come on top.
    assert [one[1] for one in answers] == [("from rank to rank", 384, 0), *[("from rank to rank", 0, 0)] * 2]
    assert [one[2] for one in answers] == [("from rank to rank", 0, 0)] * 3


def lack_memory(group):
    """Rank 0 is the rail of two ranks: of what passes through, too little fits; then all go on."""
    device = OwnDevice(group)
    with opened(group, device, algorithm="hierarchical", memory_limit=1 << 14) as comm:
        ids = torch.tensor([[2, 3, -1] if comm.rank == 0 else [0, 1, -1]])
        told = []
        for num_tokens in (8, 30, 8):
            x = torch.full((num_tokens, 24), float(comm.rank))
            received = None
            try:
                received = comm.dispatch(x, ids.expand(num_tokens, 3).contiguous())
                told.append(received.x[:, 0].unique_consecutive().tolist())
            except MemoryLimitExceeded as error:
                told.append(str(error).split(" of receive memory")[0].split("needs ")[1])
        del received
    device.end()
    return told


def test_what_passes_through_counts_against_the_limit_and_all_ranks_say_so():
    answers = run(lack_memory, 3, 2)
    (fits, why, again), *_ = answers
    assert {told[1] for told in answers} == {why}
    assert why.endswith(" bytes")
    assert int(why.split()[0]) > 1 << 14
    assert fits == again == [1.0, 2.0, 1.0, 2.0]
    assert [told[0] for told in answers[1:]] == [[0.0], []]


# -- through operators -------------------------------------------------------------------------------------------------


def watched(group):
    device, found = OwnDevice(group), []
    with opened(group, device, algorithm="hierarchical") as comm:
        x, ids = random_rows((3, 24), torch.float32, f"x {comm.rank}"), with_duplicates(3, 6, 3, seed=comm.rank)
        for is_watched in (False, True):
            with Looking() if is_watched else contextlib.nullcontext():
                received = comm.dispatch(x, ids)
                again = comm.dispatch(x, handle=received.handle)
                sums = [comm.combine(received.x, received.handle, reduce=how) for how in ("per_host", "exact")]
            found.append([received.x.clone(), again.x.clone(), *(home.clone() for home in sums)])
            assert received.handle.stamp.shape == (2 + 2 * 2 * 2,)
    device.end()
    return all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_handles_of_operators_know_what_crosses():
    assert run(watched, 2, 1) == [True, True]


def repeated(group):
    """Gradients with and without activation checkpointing, which makes the calls of the forward again in backward."""
    device, found = OwnDevice(group), []
    with opened(group, device, algorithm="hierarchical") as comm:
        ids = with_duplicates(3, 6, 3, seed=comm.rank)

        def layer(x):
            received = comm.dispatch(x, ids)
            rows = received.x.square()
            return comm.combine(rows, received.handle, reduce="per_host") + comm.combine(rows, received.handle)

        for make in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
            x = random_rows((3, 24), torch.float32, f"x {comm.rank}").requires_grad_()
            make(x).square().sum().backward()
            found.append(x.grad.clone())
    device.end()
    return torch.equal(*found)


def test_what_activation_checkpointing_repeats_crosses_alike():
    assert run(repeated, 2, 1) == [True, True]


# -- what goes wrong ---------------------------------------------------------------------------------------------------


class Silent:
    """The product's kernels; what rank 0 sends over rails is put and signalled in the first call only."""

    def __init__(self):
        self._kernels, self._num_crossed = wire_kernels_for("triton"), 0
        self.wait = self._kernels.wait

    def push(self, wire, runs, memory, slot, **options):
        self._num_crossed += wire.rank == 0 and slot == LANE_CROSSED
        if self._num_crossed < 2 or slot != LANE_CROSSED:
            self._kernels.push(wire, runs, memory, slot, **options)


def dispatch_often(comm, ids):
    """Without a look at what it gives."""
    for _ in range(3):
        comm.dispatch(torch.ones(8, 24), ids.expand(8, 3).contiguous())


def never_put(group):
    """Rank 1 waits in vain for what it is to pass on; what lies there names places, and more than were granted.

    So the others wait in vain for rank 1.
    """
    device = OwnDevice(group, wire_kernels=Silent())
    stream = LateStream(device.failures)  # a host that gives it a wait does not wait itself
    with device.using(stream), opened(group, device, algorithm="hierarchical", timeout=GIVE_UP) as comm:
        comm.dispatch(torch.zeros(8, 24), torch.tensor([[3, 4, 5]]).expand(8, 3).contiguous())
        stream.synchronize()
        region = comm._exchanger.session.memory.region
        memory = device.bytes_at(region.address, region.nbytes, None).view(torch.int32)
        ids = torch.tensor([3, 4, 5, 3, 4], dtype=torch.int32).repeat(len(memory) // 5 + 1)[: len(memory)]
        memory.copy_(ids)
        group.all_gather(None)
        told = r"the device of rank 0: counter at \d+, expected \d" if comm.rank == 1 else "rank 1"
        with pytest.raises((PeerTimeout, PeerFailed), match=told):
            dispatch_often(comm, torch.tensor([[3, -1, -1]]) if comm.rank == 0 else torch.tensor([[-1, -1, -1]]))
        group.all_gather(None)
        is_untouched = torch.equal(memory, ids)
        stream.synchronize()
    device.end()
    return is_untouched


def test_where_a_wait_has_failed_nothing_is_passed_on():
    # Rank 0 has packed its rows.
    assert run(never_put, 3, 2) == [False, True, True]
