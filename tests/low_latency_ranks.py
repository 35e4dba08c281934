"""What the tests of low-latency mode share: communicators, and one exchange in both modes held against the oracle."""

from datetime import timedelta

import torch
from exchange_ranks import Batch

from moecomm import Communicator
from moecomm.testing import reference_combine, reference_dispatch
from moecomm.testing.compare import assert_bitwise_equal
from moecomm.testing.contracts.cases import random_rows

SUMMABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# How ranks are made, and what they talk through.
WORLDS = [("threads", "local"), ("stepped", "local"), ("processes", "shm"), ("processes", "collective")]


def open_communicator(group, *, experts=6, hidden=16, topk=2, most=8, seconds=20, transport="auto", **options):
    """A small communicator; waits are short, because a test that has to wait has failed."""
    return Communicator(
        group,
        num_experts=experts,
        hidden=hidden,
        num_topk=topk,
        max_tokens_per_rank=most,
        transport=transport,
        timeout=timedelta(seconds=seconds),
        **options,
    )


def low_latency_of(comm, *arguments, **options):
    """A dispatch in low-latency mode."""
    return comm.dispatch(*arguments, mode="low_latency", **options)


def padding_is_zero(received):
    """Whether all rows and weights that no route fills are zero bytes."""
    counts = received.num_tokens_per_expert.tolist()
    tensors = [received.x] if received.topk_weights is None else [received.x, received.topk_weights[..., None]]
    for tensor in tensors:
        raw = tensor.contiguous().view(torch.uint8)
        if received.handle.layout == "slab":
            parts = [raw[expert, count:] for expert, count in enumerate(counts)]
        else:
            ends = received.offsets.tolist()
            starts = [0, *ends][:-1]
            parts = [raw[s + n : e] for s, n, e in zip(starts, counts, ends, strict=True)] + [raw[([0] + ends)[-1] :]]
        if any(bool(part.any()) for part in parts):
            return False
    return True


def rows_in_order(received, tensor):
    """The real rows of a slab, expert by expert, as throughput mode gives them."""
    counts = received.num_tokens_per_expert.tolist()
    parts = [tensor[expert, :count] for expert, count in enumerate(counts)]
    return torch.cat(parts) if parts else tensor.reshape(0, *tensor.shape[2:])


def compare_modes(comm, case, seed):
    """One exchange of a `contracts.Case` in throughput mode and in both low-latency layouts: the bits of the oracle."""
    everyone = [case.inputs(rank, seed) for rank in range(case.num_ranks)]
    mine, rank = everyone[comm.rank], comm.rank
    xs, ids, weights = ([getattr(one, name) for one in everyone] for name in ("x", "topk_idx", "topk_weights"))
    options = {"num_experts": case.num_experts, "expert_alignment": case.expert_alignment}
    wanted = reference_dispatch(xs, ids, weights, rank=rank, **options)
    plain = comm.dispatch(mine.x, mine.topk_idx, mine.topk_weights, expert_alignment=case.expert_alignment)
    assert_bitwise_equal(plain.x, wanted.x, "throughput: x")

    slab = low_latency_of(comm, mine.x, mine.topk_idx, mine.topk_weights)
    unpadded = reference_dispatch(xs, ids, weights, rank=rank, num_experts=case.num_experts)
    assert tuple(slab.x.shape) == (comm.num_local_experts, slab.handle.capacity, case.hidden)
    assert_bitwise_equal(slab.num_tokens_per_expert, wanted.num_tokens_per_expert, "slab: num_tokens_per_expert")
    assert_bitwise_equal(rows_in_order(slab, slab.x), unpadded.x, "slab: x")
    assert_bitwise_equal(rows_in_order(slab, slab.topk_weights), unpadded.topk_weights, "slab: topk_weights")
    assert padding_is_zero(slab)
    grouped = low_latency_of(
        comm, mine.x, mine.topk_idx, mine.topk_weights, layout="expert_major", expert_alignment=case.expert_alignment
    )
    end = wanted.x.shape[0]
    assert_bitwise_equal(grouped.x[:end], wanted.x, "expert_major: x")
    assert_bitwise_equal(grouped.topk_weights[:end], wanted.topk_weights, "expert_major: topk_weights")
    assert_bitwise_equal(grouped.offsets, wanted.offsets, "expert_major: offsets")
    assert padding_is_zero(grouped)
    if case.dtype not in SUMMABLE:
        return

    shapes = [reference_dispatch(xs, ids, rank=host, **options).x.shape for host in range(case.num_ranks)]
    ys = [random_rows(tuple(shape), case.dtype, f"y {seed} {host}") for host, shape in enumerate(shapes)]
    for topk_weights in (None, mine.topk_weights):
        home = reference_combine(ys, ids, rank=rank, topk_weights=topk_weights, **options)
        assert_bitwise_equal(comm.combine(ys[rank], plain.handle, topk_weights), home, "throughput: combine")
        for received, what in ((slab, "slab"), (grouped, "expert_major")):
            y = spread_over(received, ys[rank], plain.offsets)
            assert_bitwise_equal(comm.combine(y, received.handle, topk_weights), home, f"{what}: combine")
            buffer = comm.combine_buffer(received.handle, case.dtype)
            buffer.copy_(y)
            assert_bitwise_equal(comm.combine(buffer, received.handle, topk_weights), home, f"{what}: combine_buffer")


def spread_over(received, rows, offsets):
    """Rows of throughput mode where low-latency mode wants them; all else is NaN, which nobody may read."""
    y = torch.full_like(received.x, float("nan"))
    if received.handle.layout != "slab":
        y[: rows.shape[0]] = rows
        return y
    starts = [0, *offsets.tolist()][:-1]
    for expert, (start, count) in enumerate(zip(starts, received.num_tokens_per_expert.tolist(), strict=True)):
        y[expert, :count] = rows[start : start + count]
    return y


def check_received(received, batch, rank):
    expected = batch.received(rank)
    rows = rows_in_order(received, received.x) if received.handle.layout == "slab" else received.x
    assert_bitwise_equal(rows[: expected.x.shape[0]], expected.x, f"rank {rank}, {batch}: x")
    assert padding_is_zero(received)


def check_exchange(comm, seed, layout="slab"):
    """One dispatch and one combine in low-latency mode; what they leave in memory is poisoned."""
    batch = Batch(comm.num_ranks, seed)
    received = batch.send(comm, mode="low_latency", layout=layout)
    check_received(received, batch, comm.rank)
    batch.check_home(comm.combine(received.x, received.handle), comm.rank)
    batch.send(comm, mode="low_latency", layout=layout).x.fill_(float("nan"))


def check_exchange_patiently(comm, seed):
    """For communicators that soon lose patience: what is to work may take its time on a busy machine."""
    sequencer = comm._exchanger.session.sequencer
    timeout, sequencer.timeout = sequencer.timeout, 20
    check_exchange(comm, seed)
    sequencer.timeout = timeout
