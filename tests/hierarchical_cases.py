"""Grids of ranks, and calls between their domains whose answers are known; support for tests of `hierarchical`."""

from exchange_ranks import EXPERTS, Batch
from interleavings import receive_all

from moecomm import Topology
from moecomm.testing import reference_combine
from moecomm.testing.compare import assert_bitwise_equal

__all__ = ["GRIDS", "mixed_calls", "per_host_home"]

GRIDS = [Topology.grid(1, 1), Topology.grid(2, 2), Topology.grid(3, 1), Topology.grid(1, 3, 1), Topology.grid(*[1] * 6)]


def per_host_home(batch, rank, topology, weighted=False):
    """What `combine(..., reduce="per_host")` gives for the rows as they came."""
    ys = [batch.received(r).x for r in range(batch.num_ranks)]
    weights = batch.topk_weights(rank) if weighted else None
    return reference_combine(
        ys,
        batch.everything()[1],
        num_experts=EXPERTS,
        rank=rank,
        topk_weights=weights,
        domain_of=topology.domain_of,
    )


def mixed_calls(comms, seed):
    """Dispatches, cached dispatches and combines, which need only what has been received before; with their checks."""
    earlier = Batch(len(comms), seed)
    received = receive_all(comms, earlier)

    def dispatch(number):
        batch = Batch(len(comms), number)

        def check(got, rank):
            batch.check_received(got, rank, weighted=True)

        return (
            lambda c: batch.send(c, "dispatch_async", topk_weights=batch.topk_weights(c.rank)),
            check,
        )

    def flat(number):
        batch = Batch(len(comms), number)

        def check(got, rank):
            batch.check_received(got, rank, layout="flat")

        return lambda c: batch.send(c, "dispatch_async", layout="flat"), check

    def again():
        def check(got, rank):
            assert_bitwise_equal(got.x, earlier.received(rank).x, f"rank {rank}: cached dispatch")

        return (
            lambda c: c.dispatch_async(earlier.x(c.rank), handle=received[c.rank].handle),
            check,
        )

    def combine():
        return (
            lambda c: c.combine_async(received[c.rank].x, received[c.rank].handle),
            earlier.check_home,
        )

    def per_host():
        def check(got, rank):
            wanted = per_host_home(earlier, rank, comms[0].topology, weighted=True)
            assert_bitwise_equal(got, wanted, f"rank {rank}: per host")

        return (
            lambda c: c.combine_async(
                received[c.rank].x, received[c.rank].handle, earlier.topk_weights(c.rank), reduce="per_host"
            ),
            check,
        )

    return [dispatch(seed + 1), combine(), dispatch(seed + 2), again(), per_host(), flat(seed + 3), combine(), again()]
