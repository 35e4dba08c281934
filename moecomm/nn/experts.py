"""The experts of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from moecomm.nn.arithmetic import as_arithmetic
from moecomm.nn.backends import as_backend, choose_backend
from moecomm.nn.expert_rows import rows_of
from moecomm.nn.grouped_swiglu import apply_experts

if TYPE_CHECKING:
    from moecomm.communicator import Communicator

__all__ = ["GroupedExperts"]


@final
class GroupedExperts(nn.Module):
    """Gated MLPs (SwiGLU), one per local expert, applied to rows that are grouped by expert.

        y = (silu(x @ gate.T) * (x @ up.T)) @ down.T         gate and up are the two halves of `gate_up_proj[e]`

    Initial weights depend on the seed and on each expert's *global* id alone, so a model has the same experts however
    many ranks they are spread over. For the same reason `state_dict` has one entry per expert, named by its global id
    (`<prefix>17.gate_up_proj` `[2I, H]`, `<prefix>17.down_proj` `[H, I]`): the dicts of all ranks can be merged into
    one, and `load_state_dict` takes its own experts out of such a whole, at any number of ranks.

    Gradients of the weights are sums over all the rows that came, from whatever rank; see `MoELayer`.

    Arguments:
        num_local_experts: experts of this rank, 0 or more.
        hidden: H.
        intermediate: I.
        expert_ids: the global id of each local expert, distinct; None = 0, 1, 2, ...
        seed: of the initial weights; give each layer another.
        std: standard deviation of the initial weights.
        arithmetic: "auto" multiplies half-precision matrices with the CPU's own instructions for them if it has any,
            and through fp32 if not; "native" and "float32" force one or the other.
        row_by_row: multiply each row by itself. Slower, but a token's output then has the same bits whatever tokens
            are in the batch beside it and (where H * I is a multiple of 16) however many ranks there are: for inference
            that must repeat exactly. Calls with gradients enabled are refused. Also an attribute, to be switched.
        backend: "loops" multiplies expert by expert; "torch" by torch.nn.functional.grouped_mm; "triton" by kernels of
            our own; "auto" takes "loops" on CPUs, elsewhere the faster of the others, measured once per family of
            shapes. All but "loops" read no value on the host, and trust offsets and counts. `row_by_row` implies
            "loops".
        dtype: of the weights, torch's default when None.

    Attributes:
        chosen_backend: what "auto" came to in the last call outside a compiler; None before.

    Raises:
        ValueError: a size, id or name that makes no sense.
    """

    def __init__(
        self,
        num_local_experts: int,
        hidden: int,
        intermediate: int,
        *,
        expert_ids: Sequence[int] | None = None,
        seed: int = 0,
        std: float = 0.02,
        arithmetic: str = "auto",
        row_by_row: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_local_experts < 0 or hidden < 1 or intermediate < 1:
            raise ValueError(
                "num_local_experts must be at least 0, hidden and intermediate at least 1, "
                f"got {num_local_experts}, {hidden} and {intermediate}"
            )
        ids = tuple(range(num_local_experts) if expert_ids is None else expert_ids)
        if len(ids) != num_local_experts or len(set(ids)) != len(ids) or any(expert < 0 for expert in ids):
            raise ValueError(f"expert_ids must be {num_local_experts} distinct ids of 0 or more, got {list(ids)}")
        self.num_local_experts = num_local_experts
        self.hidden = hidden
        self.intermediate = intermediate
        self.expert_ids = ids
        self.seed = seed
        self.std = std
        self.arithmetic = as_arithmetic(arithmetic)
        self.row_by_row = row_by_row
        self.backend = as_backend(backend)
        self.chosen_backend: str | None = None
        self.gate_up_proj = nn.Parameter(
            torch.empty(num_local_experts, 2 * intermediate, hidden, device=device, dtype=dtype)
        )
        self.down_proj = nn.Parameter(torch.empty(num_local_experts, hidden, intermediate, device=device, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def for_communicator(cls, communicator: Communicator, intermediate: int, **options: Any) -> GroupedExperts:
        """The experts that `communicator` places on this rank; `options` as for the constructor."""
        ids = tuple(communicator.local_experts)
        return cls(len(ids), communicator.hidden, intermediate, expert_ids=ids, **options)

    def reset_parameters(self) -> None:
        """Draws every expert's weights anew, each from a generator of its own, in fp32 on the CPU, then rounds them."""
        if self.gate_up_proj.is_meta:
            return
        with torch.no_grad():
            for index, expert in enumerate(self.expert_ids):
                # The generator looks at 32 bits of its seed; an odd factor keeps seeds and experts apart.
                generator = torch.Generator().manual_seed((self.seed * 0x9E3779B1 + expert) % (1 << 32))
                for weight in (self.gate_up_proj, self.down_proj):
                    weight[index].copy_(torch.empty(weight.shape[1:]).normal_(0, self.std, generator=generator))

    def extra_repr(self) -> str:
        return f"{self.num_local_experts}, {self.hidden}, {self.intermediate}"

    def forward(
        self,
        x: Tensor,
        offsets: Tensor | None = None,
        *,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Applies each expert to its rows, in one of three forms, which are what the layouts of a dispatch give:

            experts(received.x, received.offsets)                                            expert_major
            experts(received.x, num_tokens_per_expert=received.num_tokens_per_expert)        slab
            experts(received.x, topk_idx=received.topk_idx, topk_weights=received.topk_weights)      flat

        In the flat form a row goes to every local expert that it names, and its output is the sum over them, which is
        what `combine` takes there: in ascending k, in fp32 (fp64), of outputs of experts that were rounded once. Rows
        are not copied for that by "triton", which gathers them as it multiplies.

        Under autocast, rows and weights are cast to its dtype, as by `torch.nn.Linear`. Otherwise their dtypes may
        differ, and the result has that of `x`.

        Arguments:
            x: floating. expert_major: `[N, H]`, rows grouped by local expert; slab: `[E_local, capacity, H]`; flat:
                `[N, H]` in any order.
            offsets: `[E_local]` int32 or int64, inclusive prefix sums of the rows per expert, alignment included. Rows
                beyond offsets[-1], as of a low-latency dispatch, cost nothing: they give zero rows, in `out` what was
                there before, and their gradients are zero.
            num_tokens_per_expert: slab: `[E_local]` int32 or int64, the real rows of each expert, 0 to capacity. The
                others are not read; else as rows beyond offsets[-1].
            topk_idx: flat: `[N, K]` int32 or int64, local expert ids, -1 = none.
            topk_weights: flat: `[N, K]` float32 or float64, of each choice; None = 1. Multiplies what the expert's last
                product is applied to, so it costs no pass of its own.
            out: like `x`, contiguous, in the dtype of the result; the last step writes into it, which saves a copy when
                it is a `Communicator.combine_buffer`. None = new memory.

        Returns:
            Like `x`; in the memory of `out` if given. Differentiable once, in `x`, `topk_weights` and the weights of
            the experts; an expert without rows, or a rank without any, gets gradients that are zero tensors.

        Raises:
            ValueError: shapes, dtypes, offsets, counts or ids that do not fit; none or several of the three forms;
                `row_by_row` with gradients enabled; a backend that cannot serve such tensors.
        """
        is_slab = num_tokens_per_expert is not None
        if x.dim() != (3 if is_slab else 2) or x.shape[-1] != self.hidden:
            form = f"[E_local = {self.num_local_experts}, capacity, " if is_slab else "[N, "
            raise ValueError(f"x must be {form}hidden = {self.hidden}], got {list(x.shape)}")
        if is_slab and x.shape[0] != self.num_local_experts:
            raise ValueError(f"x must have a slab per expert, {self.num_local_experts}, got {list(x.shape)}")
        rows = rows_of(
            x,
            self.num_local_experts,
            offsets=offsets,
            num_tokens_per_expert=num_tokens_per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
        )
        gate_up_proj: Tensor = self.gate_up_proj
        down_proj: Tensor = self.down_proj
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, gate_up_proj, down_proj = x.to(dtype), gate_up_proj.to(dtype), down_proj.to(dtype)
        if out is not None and (out.shape != x.shape or out.dtype != x.dtype or not out.is_contiguous()):
            raise ValueError(
                f"out must be contiguous {x.dtype} {list(x.shape)}, got {out.dtype} {list(out.shape)}"
                f"{'' if out.is_contiguous() else ', not contiguous'}"
            )
        backend: str = "loops" if self.row_by_row else self.backend
        if not torch.compiler.is_compiling():
            learned = (x, gate_up_proj, down_proj, rows.row_weights)
            trains = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in learned)
            plain = x.flatten(0, 1) if is_slab else x
            backend = choose_backend(backend, plain, rows, gate_up_proj, down_proj=down_proj, trains=trains)
            self.chosen_backend = backend
        return apply_experts(
            x,
            rows,
            gate_up_proj,
            down_proj=down_proj,
            out=out,
            arithmetic=self.arithmetic,
            row_by_row=self.row_by_row,
            backend=backend,
        )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, weight in self._parameters.items():
            assert weight is not None
            source = weight if keep_vars else weight.detach()
            for index, expert in enumerate(self.expert_ids):
                destination[f"{prefix}{expert}.{name}"] = source[index]

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for name, weight in self._parameters.items():
            assert weight is not None
            for index, expert in enumerate(self.expert_ids):
                key = f"{prefix}{expert}.{name}"
                source = state_dict.get(key)
                if source is None:
                    missing_keys.append(key)
                elif source.shape != weight.shape[1:]:
                    error_msgs.append(f"{key} must be {list(weight.shape[1:])}, got {list(source.shape)}")
                else:
                    with torch.no_grad():
                        weight[index].copy_(source)
        # Experts of other ranks are expected here; anything else under this prefix is not.
        for key in state_dict:
            owner, _, name = key.removeprefix(prefix).partition(".")
            if key.startswith(prefix) and not (owner.isdecimal() and name in self._parameters):
                unexpected_keys.append(key)
