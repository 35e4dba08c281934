"""Captured calls of ranks in domains, a process each, over a network that is late; with a mistake, if one is wanted.

    heap: what a rank has, at the same offsets everywhere, a quarter of it more than is used

heap:   board | windows | outputs | messages to far ranks | rows that come home

Rank r has the PE R - 1 - r; so many neighbouring ranks as said are a domain. Before a rank begins a call, it poisons
where its messages to far ranks are made: what the protocol says that nobody reads any more.
"""

import contextlib

import torch
import triton
import triton.language as tl
from captured_ranks import GUARD, POISON_WORD, CapturedRank, Case
from captured_replay import recorded, replay
from late_network import LateNetwork
from window_ranks import fill

from moecomm.errors import CallMismatch, PeerTimeout
from moecomm.kernels.captured import FarMemory
from moecomm.kernels.triton import captured_far
from moecomm.kernels.triton.captured_far import put_messages_kernel, put_outputs_kernel
from moecomm.kernels.triton.captured_state import NUM_SLOTS
from moecomm.kernels.triton.nvshmem_device import fence, launch_linked, put, put_signal, signal
from moecomm.kernels.wire import Wire
from moecomm.testing import masked, with_duplicates
from moecomm.transports.peers import gather_peers
from moecomm.transports.shm import ShmTransport

BETWEEN_CALLS = ("no fence", "too few windows")
MISTAKES = ("signal before put", "messages change at once", "rows: no fence", *BETWEEN_CALLS)


class FarCapturedRank(CapturedRank):
    """One rank.

    Arguments:
        heaps: by rank, the address of each one's heap here.
        per_domain: ranks that address each other's memory.
    """

    def __init__(self, case, rank, heaps, per_domain, **options):
        starts, needed = heap_of(case)
        is_near = [peer // per_domain == rank // per_domain for peer in range(case.num_ranks)]
        boards, windows, outputs = (
            [heap + start if near else 0 for heap, near in zip(heaps, is_near, strict=True)] for start in starts[:3]
        )
        wire = Wire(
            rank=rank,
            boards=torch.tensor(boards),
            pes=torch.arange(case.num_ranks, dtype=torch.int32).flip(0),
            board=boards[rank],
            num_slots=NUM_SLOTS,
        )
        self.packed, landings = (heaps[rank] + start for start in starts[3:5])
        far = FarMemory(wire, self.packed, landings, needed.landing + GUARD)
        super().__init__(case, rank, boards, windows, outputs, far=far, **options)
        self.num_sent = 0

    def send(self, inputs):
        self.spoil(self.num_sent)
        super().send(inputs)
        self.num_sent += 1

    def spoil(self, call):
        """Overwrites the messages to far ranks that the window of a call holds."""
        num_windows, num_words = self.exchange.control.num_windows, self.case.num_ranks * self.message_bytes // 4
        start = self.packed + call % num_windows * num_words * 4
        fill[(1,)](start, num_words, POISON_WORD, BLOCK=triton.next_power_of_2(num_words))


def heap_of(case):
    """Where each part begins, and where the last ends; what the kernels say of memory."""
    *sizes, needed = case.memory()
    sizes += [sizes[1], needed.landings + 2 * case.depth * GUARD]
    starts = [0]
    for size in sizes:
        starts.append(-(-(starts[-1] + size) // GUARD) * GUARD)
    return starts, needed


@contextlib.contextmanager
def far_rank(group, case, per_domain, seed, *, slowness=1, **options):
    """The rank of this process, its heap in shared memory, and a network."""
    nbytes = heap_of(case)[0][-1] + GUARD
    transport = ShmTransport(group, gather_peers(group), 1)
    heaps = transport.addresses(transport.allocate(nbytes))
    how = (seed * 100 + group.rank, heaps[::-1], group.size - 1 - group.rank, nbytes)
    with LateNetwork(*how, slowness=slowness) as network:
        rank = FarCapturedRank(case, group.rank, heaps, per_domain, **options)
        rank.network = network
        rank.poison_all()
        group.all_gather(None)
        yield rank
        group.all_gather(None)
    # Nobody lets go of memory that is still put to.
    group.all_gather(None)
    transport.close()


def call_after_call(group, case, per_domain, num_calls, seed):
    """Pairs, compared with the reference; what was called of the network."""
    with far_rank(group, case, per_domain, seed) as rank:
        for call in range(num_calls):
            routing = with_duplicates if call % 3 == 2 and case.layout == "expert_major" else masked
            rank.pair(call, case.inputs(call, routing=routing))
        nobody = case.inputs(num_calls, routing=lambda t, e, k, seed: torch.full((t, k), -1))
        rank.pair(num_calls, nobody)
        rank.check_guards()
        return rank.network.calls


def replayed(group, case, per_domain, num_replays, seed):
    """A dispatch and its combine are recorded once, with the number of tokens of each rank, and replayed."""
    tokens = [3, 0, case.most, 2][: group.size]
    mine = tokens[group.rank]
    ids = torch.full((mine, case.topk), -1)
    x, out = (torch.zeros(mine, case.hidden, dtype=case.dtype) for _ in range(2))
    weights, at_home = torch.zeros(mine, case.topk), torch.zeros(mine, case.topk)
    with far_rank(group, case, per_domain, seed) as rank:
        y = rank.answer(0).clone()
        with recorded() as launches:
            rank.exchange.dispatch(x, ids, rank.block, topk_weights=weights)
            rank.exchange.combine(y, rank.block.placed, out, topk_weights=at_home)
        for call in range(num_replays):
            inputs = case.inputs(call, tokens)
            x.copy_(inputs.rows[group.rank])
            ids.copy_(inputs.ids[group.rank])
            weights.copy_(inputs.weights[group.rank])
            at_home.copy_(rank.weights_at_home(call, mine))
            y.copy_(case.answers(call)[group.rank])
            rank.spoil(call)
            replay(launches)
            rank.exchange.check()
            rank.compare(inputs, call)
            rank.compare_sums(call, out, at_home)


# -- mistakes ----------------------------------------------------------------------------------------------------------


@triton.jit
def broken_messages(
    packed, windows, message_bytes, num_windows, rows_offset, row_bytes, totals, ticket, rank, num_ranks, boards, pes,
    board, lane, status, IS_FIRST: tl.constexpr,
):  # fmt: skip
    """As `put_messages_kernel`, without a fence, or with the signal first."""
    to = (rank + 1 + tl.program_id(0)) % num_ranks
    if tl.load(boards + to) == 0:
        window = ((tl.load(ticket) - 1) & (num_windows - 1)) * num_ranks * message_bytes
        source = packed + window + to * message_bytes
        target = windows + window + rank * message_bytes
        nbytes = rows_offset + tl.load(totals + to) * row_bytes
        pe = tl.load(pes + to)
        if IS_FIRST:
            fence()
            signal(board + lane * 8, 1, pe)
            put(target, source, nbytes, pe)
        else:
            put_signal(target, source, nbytes, board + lane * 8, 1, pe)


@triton.jit
def no_fence():
    tl.debug_barrier()


def spoiled(rank, mistake):
    """Makes the product's kernels, or the order of things here, wrong in one way; what undoes it."""
    plain = captured_far.launch_linked

    def launch(kernel, num_programs, device, library, *args, **constants):
        if kernel is put_messages_kernel:
            constants = {"IS_FIRST": mistake == "signal before put"}
            kernel = broken_messages
        plain(kernel, num_programs, device, library, *args, **constants)

    if mistake in ("signal before put", "no fence"):
        captured_far.launch_linked = launch
    if mistake == "rows: no fence":
        put_outputs_kernel.fn.__globals__["fence"] = no_fence
    if mistake == "messages change at once":
        send = rank.send

        def send_and_spoil(inputs):
            send(inputs)
            rank.spoil(rank.num_sent - 1)

        rank.send = send_and_spoil

    def undo():
        captured_far.launch_linked = launch_linked
        put_outputs_kernel.fn.__globals__["fence"] = fence

    return undo


def is_right(group, per_domain, mistake, in_pairs, seed):
    """Whether some calls give what they should.

    Without combines a rank sends when it has received, whatever has become of what it sent before; so the network is
    much later then than kernels are interpreted.
    """
    case = Case(group.size, "slab", num_experts=4, topk=3, hidden=6, too_few_windows=mistake == "too few windows")
    how = {"timeout_ns": 2_000_000_000} if in_pairs else {"timeout_ns": 8_000_000_000, "slowness": 60}
    with far_rank(group, case, per_domain, seed, **how) as rank:
        undo = spoiled(rank, mistake)
        try:
            for call in range(4 if in_pairs else 6):
                inputs = case.inputs(call, [case.most] * group.size)
                rank.pair(call, inputs) if in_pairs else rank.dispatch(call, inputs)
        except (AssertionError, ValueError, CallMismatch, PeerTimeout):
            return False  # what becomes of wrong bytes; who waits for this rank gives up soon
        finally:
            undo()
    return True
