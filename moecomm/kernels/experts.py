"""The contract of what computes the experts of a rank on a device, and which rows are whose.

N rows that experts compute with, H hidden, I intermediate, E experts of this rank. For each expert and its rows

    hidden = x @ gate_up_proj[e].T           [n, 2I]: I columns of gate, then I of up
    y      = (silu(gate) * up) @ down_proj[e].T

silu(gate) * up is multiplied by the weight of its row, if rows have weights. S rows that arrived, each for up to K
experts: where rows come once for all experts of the rank (flat), row n of the N is row `row_idx[n]` of the S, and each
of the S outputs is a sum over up to K of the N.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = ["ExpertKernels", "ExpertRows", "Gathered"]


class Gathered(NamedTuple):
    """How the N rows are taken from S, and their outputs added up again.

    Attributes:
        row_idx: `[N]` int64, the row of S that row n is.
        routes: `[S, K]` int64, where in N each choice of each row of S is; -1 = nowhere. Outputs are added in ascending
            k, in fp32 (fp64), and rounded once.
    """

    row_idx: Tensor
    routes: Tensor


class ExpertRows(NamedTuple):
    """Which of the N rows belong to which expert. Values stay on the device.

        expert_major   expert e owns the rows offsets[e-1] .. offsets[e]
        slab           expert e owns `capacity` rows, of which the first num_tokens_per_expert[e] are real
        flat           as expert_major, the rows gathered

    Attributes:
        num_rows: N.
        offsets: `[E]` int32 or int64, inclusive prefix sums; None = slab. Rows beyond the last are nobody's.
        num_tokens_per_expert: slab: `[E]` int32 or int64. Rows beyond the real ones are never read.
        capacity: slab: rows of each expert.
        gathered: flat: how; None = x has N rows, and so has y.
        row_weights: `[N]` float32 or float64; None = 1.
    """

    num_rows: int
    offsets: Tensor | None
    num_tokens_per_expert: Tensor | None = None
    capacity: int = 0
    gathered: Gathered | None = None
    row_weights: Tensor | None = None

    @property
    def layout(self) -> str:
        """`expert_major`, `slab` or `flat`."""
        if self.gathered is not None:
            return "flat"
        return "expert_major" if self.offsets is not None else "slab"


class ExpertKernels(Protocol):
    """Grouped SwiGLU on one kind of device. No method reads a value from the device, so none makes the host wait.

    Offsets and counts are trusted: the caller gives them as dispatch returned them.
    """

    @property
    def version(self) -> str:
        """Changes whenever the speed may have changed: measurements are kept by it."""

    def refusal(self, x: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> str | None:
        """Why such tensors cannot be served, in a sentence; None if they can. Looks at no values."""

    def outputs(
        self,
        x: Tensor,
        rows: ExpertRows,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        *,
        out: Tensor | None,
        keeps_hidden: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Applies each expert to its rows.

        Arguments:
            x: `[N, H]` contiguous; flat: `[S, H]`.
            rows: which are whose.
            gate_up_proj: `[E, 2I, H]`.
            down_proj: `[E, H, I]`.
            out: like x, contiguous, written; rows that are padding or nobody's stay as they are. None = new memory, in
                which they are zero.
            keeps_hidden: return what `gradients` needs.

        Returns:
            Like x, `out` if given; and `[N, 2I]` gate and up, dtype of `x`, or None. Rows of the latter that are
            padding or nobody's are undefined.
        """

    def gradients(
        self,
        grad_y: Tensor,
        x: Tensor,
        rows: ExpertRows,
        gate_up_proj: Tensor,
        *,
        down_proj: Tensor,
        hidden: Tensor,
        needs: tuple[bool, bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of `x`, `gate_up_proj`, `down_proj` and the row weights, each in the dtype of its tensor.

        Arguments:
            grad_y: like x, contiguous.
            hidden: of `outputs`.
            needs: which gradients are wanted; the others are None.

        Returns:
            Like x, zero where rows are padding or nobody's; `[E, 2I, H]`; `[E, H, I]`, zero for experts without rows;
            `[N]`, zero where x's are.
        """
