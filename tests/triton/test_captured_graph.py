"""A dispatch and its combine as CUDA graphs, replayed with new contents: ranks of one process, each with its stream.

On a GPU these are graphs; on the CPU, where Triton interprets, launches that are kept and made again, phase by phase.
"""

import contextlib

import pytest
import torch
from captured_ranks import Case
from captured_replay import recorded, replay
from eager_cases import REFERENCE, Receiver, send
from kernel_cases import assert_same_bits

from moecomm.kernels import kernels_for
from moecomm.kernels.triton.captured import CapturedExchange, captured_memory
from moecomm.kernels.triton.runtime import is_interpreted

HAS_GPU = torch.cuda.is_available() and not is_interpreted()
WITH_GPU = pytest.param("cuda", marks=pytest.mark.skipif(not HAS_GPU, reason="needs a GPU and TRITON_INTERPRET=0"))
WITHOUT = pytest.param("cpu", marks=pytest.mark.skipif(not is_interpreted(), reason="needs TRITON_INTERPRET=1"))


class Memory:
    """What all ranks of a case give to each other, in one device's memory."""

    def __init__(self, case, device):
        self.needed = captured_memory(
            num_ranks=case.num_ranks,
            max_in_flight=1,
            max_tokens_per_rank=case.most,
            num_topk=case.topk,
            row_bytes=case.row_bytes,
            value_bytes=4,
            num_rows=case.num_rows,
        )
        parts = {"boards": self.needed.board, "windows": self.needed.windows, "outputs": self.needed.outputs}
        words = {name: -(-nbytes // 64) * 8 + 8 for name, nbytes in parts.items()}
        self.kept = {
            name: torch.zeros(case.num_ranks, n, dtype=torch.int64, device=device) for name, n in words.items()
        }
        self.places = {name: [-(-row.data_ptr() // 64) * 64 for row in one] for name, one in self.kept.items()}


class GraphRank:
    """One rank: the tensors that a graph reads and writes, and the graph."""

    def __init__(self, case, rank, memory, tokens, device):
        self.case, self.rank, self.device = case, rank, torch.device(device)
        self.exchange = CapturedExchange(
            rank,
            **memory.places,
            message_bytes=memory.needed.message,
            output_bytes=memory.needed.output,
            expert_rank=case.world.expert_rank.to(device),
            expert_local=case.world.expert_local.to(device),
            max_tokens_per_rank=case.most,
        )
        size = {"dtype": case.dtype, "device": device}
        self.rows = torch.zeros(case.answers(0)[rank].shape, **size)
        self.values = torch.zeros(len(self.rows), device=device)
        self.block = self.exchange.block(case.form, self.rows.data_ptr(), self.values.data_ptr())
        self.x, self.out = (torch.zeros(tokens[rank], case.hidden, **size) for _ in range(2))
        self.ids = torch.full((tokens[rank], case.topk), -1, device=device)
        self.weights = torch.zeros(tokens[rank], case.topk, device=device)
        self.y = torch.zeros_like(self.rows)
        self.wanted = Receiver(REFERENCE, case.world, rank, case.row_bytes, 4, **case.block)
        self.stream = torch.cuda.Stream(device) if self.device.type == "cuda" else None

    def phases(self):
        exchange, block = self.exchange, self.block
        return [
            lambda: exchange.send(self.x, self.ids, block, topk_weights=self.weights),
            lambda: exchange.receive(block),
            lambda: exchange.send_rows(self.y, block.placed),
            lambda: exchange.sum_rows(block.placed, self.out, topk_weights=self.weights),
        ]

    def on_stream(self):
        return torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext()

    def capture(self):
        """What replays a pair: one graph, or each phase's launches."""
        if self.stream is None:
            kept = []
            for phase in self.phases():
                with recorded() as launches:
                    phase()
                kept.append(lambda launches=launches: replay(launches))
            return kept
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for phase in self.phases():
                phase()
        return [graph.replay]

    def give(self, inputs, call):
        weights = inputs.weights[self.rank].nan_to_num(0)
        answer = self.case.answers(call)[self.rank]
        given = ((self.x, inputs.rows[self.rank]), (self.ids, inputs.ids[self.rank]))
        for kept, new in (*given, (self.weights, weights), (self.y, answer)):
            kept.copy_(new)

    def compare(self, inputs, call):
        self.exchange.check()
        expected = self.wanted.receive(send(REFERENCE, self.case.world, inputs)[0], inputs)
        placed, num_tokens = self.block.placed, len(self.x)
        rows, values = (one.cpu().reshape(-1).view(torch.uint8) for one in (self.rows, self.values))
        assert_same_bits(rows, self.wanted.rows.part)
        assert_same_bits(values, self.wanted.values.part)
        assert_same_bits(placed.arrived.num_tokens_per_expert.cpu(), expected.num_tokens_per_expert)
        assert_same_bits(placed.routes[:num_tokens].cpu(), expected.routes)
        want, answers = torch.empty_like(self.out, device="cpu"), self.case.answers(call)
        addresses = [answer.data_ptr() for answer in answers]
        kernels_for("reference").combine_rows(want, expected.routes, addresses, weights=self.weights.cpu())
        assert_same_bits(self.out.cpu(), want)


def wait_for(device):
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("device", [WITHOUT, WITH_GPU])
@pytest.mark.parametrize("layout", ["slab", "expert_major"])
def test_graphs_of_all_ranks_are_replayed_together(device, layout):
    case = Case(2, layout, hidden=24, num_experts=3)
    tokens = [3, 4]
    memory = Memory(case, device)
    ranks = [GraphRank(case, rank, memory, tokens, device) for rank in range(case.num_ranks)]
    # Once without a graph and in step, so that all kernels are compiled and loaded before any of them waits for a peer.
    for phases in zip(*(rank.phases() for rank in ranks), strict=True):
        for rank, phase in zip(ranks, phases, strict=True):
            with rank.on_stream():
                phase()
            wait_for(device)
    captured = [rank.capture() for rank in ranks]
    for call in range(4):
        inputs = case.inputs(call, tokens)
        inputs.weights = [weights.nan_to_num(0) for weights in inputs.weights]
        for rank in ranks:
            rank.give(inputs, call)
        wait_for(device)
        for pieces in zip(*captured, strict=True):
            for rank, piece in zip(ranks, pieces, strict=True):
                with rank.on_stream():
                    piece()
        wait_for(device)
        for rank in ranks:
            rank.compare(inputs, call)
