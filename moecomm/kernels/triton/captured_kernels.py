"""Triton's calls that a device makes by itself, as communicators make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from moecomm.kernels.captured import CapturedCalls, StaticCalls
from moecomm.kernels.triton.captured import CapturedExchange, captured_memory
from moecomm.kernels.triton.captured_static import StaticExchange, static_mailbox_bytes

__all__ = ["TritonCapturedKernels"]


@final
class TritonCapturedKernels:
    """See `moecomm.kernels.captured.CapturedKernels`."""

    memory = staticmethod(captured_memory)
    make = CapturedExchange
    mailbox_bytes = staticmethod(static_mailbox_bytes)

    def make_static(self, calls: CapturedCalls, *, mailboxes: Sequence[int], regions: Sequence[int]) -> StaticCalls:
        """See `CapturedKernels.make_static`; `calls` are those that `make` has made."""
        assert isinstance(calls, CapturedExchange)
        return StaticExchange(calls, mailboxes, regions)
