"""A low-latency pair that needs nothing of the host: kernels of captured calls, replayed as one CUDA graph per rank.

Rows are the answer to themselves, and lie where peers read them, as an expert's output in a `combine_buffer` does.

T tokens of a rank   K num_topk   H hidden   E experts   R ranks
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from answers import poisoned, wrong_bits
from context import Context
from torch import Tensor

from moecomm.kernels.eager import Form
from moecomm.kernels.triton.captured import CapturedExchange, captured_memory
from moecomm.placement import Placement
from moecomm.testing import uniform

__all__ = ["GraphPairs"]

_TIMEOUT_NS = 5_000_000_000
_LINE = 64


class GraphPairs:
    """Dispatch into slabs and weighted combine of all virtual ranks, a stream and on GPUs a graph each."""

    def __init__(self, context: Context) -> None:
        sizes, model, device = context.sizes, context.sizes.exchange, context.device
        self._timer, self._num_ranks, tokens = context.timer, sizes.num_ranks, sizes.decode_tokens
        everyone = range(self._num_ranks)
        placement = Placement(model.num_experts, self._num_ranks)
        generator = torch.Generator(device).manual_seed(context.seed)

        def random(columns: int) -> Tensor:
            return torch.randn(tokens, columns, generator=generator, device=device)

        self._x = [random(model.hidden).bfloat16() for _ in everyone]
        self._weights = [random(model.num_topk) for _ in everyone]
        self._ids = [
            uniform(tokens, model.num_experts, model.num_topk, seed=context.seed + rank).to(device) for rank in everyone
        ]
        self._out = [poisoned(tokens, model.hidden, dtype=torch.bfloat16, device=device) for _ in everyone]
        capacity = self._num_ranks * tokens
        form = Form(model.num_topk, model.hidden * 2, 0, capacity, 1, capacity)
        self._slabs = [
            torch.zeros(len(placement.local_experts(rank)), capacity, model.hidden, dtype=torch.bfloat16, device=device)
            for rank in everyone
        ]
        places = [slab.data_ptr() for slab in self._slabs]
        needed = captured_memory(
            num_ranks=self._num_ranks,
            max_in_flight=1,
            max_tokens_per_rank=tokens,
            num_topk=model.num_topk,
            row_bytes=form.row_bytes,
            value_bytes=0,
            num_rows=0,
        )
        words = [-(-num_bytes // _LINE) * _LINE // 8 for num_bytes in (needed.board, needed.windows)]
        self._memory = [torch.zeros(self._num_ranks, n, dtype=torch.int64, device=device) for n in words]
        boards, windows = ([each.data_ptr() for each in memory] for memory in self._memory)
        self._exchanges = [
            CapturedExchange(
                rank,
                boards=boards,
                windows=windows,
                outputs=places,
                message_bytes=needed.message,
                output_bytes=0,
                expert_rank=placement.expert_rank.to(device),
                expert_local=placement.expert_local.to(device),
                max_tokens_per_rank=tokens,
                timeout_ns=_TIMEOUT_NS,
            )
            for rank in everyone
        ]
        self._blocks = [exchange.block(form, places[rank]) for rank, exchange in enumerate(self._exchanges)]
        self._outputs = [exchange.outputs_at(places) for exchange in self._exchanges]
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def step(self) -> None:
        """One pair of all ranks."""
        if self._graphs:
            self._timer.on_streams([lambda rank: self._graphs[rank].replay()], self._num_ranks)
        else:
            self._timer.on_streams(self._phases, self._num_ranks)

    def capture(self) -> None:
        """Makes the graphs, after a pair in step: then all kernels are loaded, and nobody waits for a compiler."""
        for phase in self._phases:
            self._timer.on_streams([phase], self._num_ranks)
            self._timer.synchronize()
        if self._timer.is_gpu:
            self._graphs = [self._captured(rank) for rank in range(self._num_ranks)]

    def wrong(self) -> int:
        """Elements that are not the weighted sum of a token's own row; poisons them for the next."""
        wrong = 0
        parts = zip(self._exchanges, self._out, self._x, self._weights, strict=True)
        for exchange, out, x, weights in parts:
            exchange.check()
            total = torch.zeros_like(x, dtype=torch.float32)
            for weight in weights.unbind(1):
                total += weight[:, None] * x.float()
            wrong += wrong_bits(out, total.to(out.dtype))
            out.fill_(torch.nan)
        return wrong

    @property
    def _phases(self) -> list[Callable[[int], object]]:
        return [self._send, self._receive, self._answer, self._sum]

    def _captured(self, rank: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # type: ignore[no-untyped-call]
            for phase in self._phases:
                phase(rank)
        return graph

    def _send(self, rank: int) -> None:
        self._exchanges[rank].send(self._x[rank], self._ids[rank], self._blocks[rank])

    def _receive(self, rank: int) -> None:
        self._exchanges[rank].receive(self._blocks[rank])

    def _answer(self, rank: int) -> None:
        placed = self._blocks[rank].placed
        self._exchanges[rank].send_rows(self._slabs[rank], placed, outputs=self._outputs[rank])

    def _sum(self, rank: int) -> None:
        placed, outputs = self._blocks[rank].placed, self._outputs[rank]
        self._exchanges[rank].sum_rows(placed, self._out[rank], topk_weights=self._weights[rank], outputs=outputs)
