"""A combine of devices over rails whose sums have the bits of one domain; see device_answers.py for what comes home."""

from __future__ import annotations

from typing import ClassVar

import torch

from moecomm.algorithms.device_answers import Asked
from moecomm.algorithms.device_hierarchical_combine import DeviceHierarchicalCombine
from moecomm.devices.queue import Tensors

__all__ = ["DeviceExactCombine"]


class DeviceExactCombine(DeviceHierarchicalCombine):
    """One whose rails sum the rows of a token only where all of them lie there, and else put them home one by one."""

    is_exact = True
    # Whether the token is whole there: int32.
    asked_with: ClassVar[tuple[int, ...]] = (4,)
    asked: Asked

    def _asked_with(self) -> Tensors:
        assert self.routing.routes is not None
        self.asked = self.rails.answers.asked(self.routing.routes)
        return (self.asked.is_whole.to(torch.int32),)

    def _made_of(
        self, routes: torch.Tensor, weights: torch.Tensor | None, asked: list[int], num_answers: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        is_whole = self.device.view(asked[0], None, torch.int32, (len(routes), 1)) != 0
        return self.rails.answers.at_rail(routes, is_whole, weights, num_answers)

    def _add_up(self, addresses: list[int], out: torch.Tensor) -> torch.Tensor:
        """Sums made at home first, then those that came, as they came: to add them to zero would lose a zero's sign."""
        answers, routing, kernels = self.rails.answers, self.routing, self.exchange.kernels
        assert routing.routes is not None
        starts, num_answers = [0] * len(addresses), 0
        for part in self.answers.arriving:
            starts[self._domain_of(part.sender)] = num_answers
            num_answers += part.num_rows
        come = answers.at_home(self.asked, self.rails.queue.upload(torch.tensor(starts)))
        tokens = answers.tokens_of(self.asked, come, num_answers)
        routes = torch.where(self.asked.domains >= 0, come, self.rails.near(routing.routes))
        routes = torch.where(self.asked.is_whole, -1, routes)
        # Numbered on from domain to domain: row 0 of each would lie before its first.
        row_bytes = out.shape[1] * out.element_size()
        of_answers = [at - start * row_bytes for at, start in zip(addresses, starts, strict=True)]
        rows = [[*where, *of_answers] for where in self.addresses[: self.num_planes]]
        self.row_format.reduce(len(out), routes, rows, self.topk_weights, out)
        for part in self.answers.arriving:
            domain, num_rows = self._domain_of(part.sender), part.num_rows
            if num_rows:
                sums = self.device.view(addresses[domain], None, out.dtype, (num_rows, out.shape[1]))
                places = tokens[starts[domain] :][:num_rows]
                kernels.push_rows(sums, places.view(-1, 1), [out.data_ptr()])
        return out

    def _domain_of(self, rank: int) -> int:
        return self.rails.topology.domain_of[rank]

    def _values_home(self, addresses: list[int]) -> Tensors:
        routing = self.routing
        assert routing.routes is not None
        (far,) = super()._values_home(addresses)
        near = self.rails.near(routing.routes)
        values = self._values_of(routing.topk_idx, near, self.addresses[self.num_planes])
        # What is of no expert is 0 in both.
        return (torch.where(self.rails.other_domain[routing.topk_idx.long()] < 0, values, far),)
