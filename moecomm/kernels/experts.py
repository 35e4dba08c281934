"""The contract of what computes the experts of a rank on a device.

N rows, H hidden, I intermediate, E experts of this rank. Rows are grouped by expert: expert e owns the rows
offsets[e-1] .. offsets[e]. For each expert

    hidden = x @ gate_up_proj[e].T           [n, 2I]: I columns of gate, then I of up
    y      = (silu(gate) * up) @ down_proj[e].T
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["ExpertKernels"]


class ExpertKernels(Protocol):
    """Grouped SwiGLU on one kind of device. No method reads a value from the device, so none makes the host wait.

    Offsets are trusted: the caller gives them as dispatch returned them.
    """

    @property
    def version(self) -> str:
        """Changes whenever the speed may have changed: measurements are kept by it."""

    def refusal(self, x: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> str | None:
        """Why such tensors cannot be served, in a sentence; None if they can. Looks at no values."""

    def outputs(
        self,
        x: Tensor,
        offsets: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        *,
        out: Tensor | None,
        keeps_hidden: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Applies each expert to its rows.

        Arguments:
            x: `[N, H]` contiguous.
            offsets: `[E]` int32 or int64, inclusive prefix sums.
            gate_up_proj: `[E, 2I, H]`.
            down_proj: `[E, H, I]`.
            out: `[N, H]` contiguous, written; its rows beyond offsets[-1] stay as they are. None = new memory, in which
                they are zero.
            keeps_hidden: return what `gradients` needs.

        Returns:
            `[N, H]`, `out` if given; and `[N, 2I]` gate and up, dtype of `x`, or None. Rows of the latter beyond
            offsets[-1] are undefined.
        """

    def gradients(
        self,
        grad_y: Tensor,
        x: Tensor,
        offsets: Tensor,
        gate_up_proj: Tensor,
        *,
        down_proj: Tensor,
        hidden: Tensor,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of `x`, `gate_up_proj` and `down_proj`, each in the dtype of its tensor.

        Arguments:
            grad_y: `[N, H]` contiguous.
            hidden: of `outputs`.
            needs: which gradients are wanted; the others are None.

        Returns:
            `[N, H]`, zero beyond offsets[-1]; `[E, 2I, H]`; `[E, H, I]`, zero for experts without rows.
        """
