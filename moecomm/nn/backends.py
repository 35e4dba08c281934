"""Which implementation computes the experts: as asked for, or the faster one as measured.

"loops"    one product per expert, any device and dtype; reads offsets and counts on the host
"torch"    torch.nn.functional.grouped_mm
"triton"   kernels of our own
"auto"     "loops" on CPUs. On CUDA "triton" or "torch": both are timed once per family of shapes, the choice is kept
           on disk, and logged.
"""

from __future__ import annotations

import logging
from typing import Any, Literal, cast

import torch
from torch import Tensor

from moecomm.kernels.choices import Choices
from moecomm.kernels.experts import ExpertRows
from moecomm.kernels.registry import expert_kernels_for

__all__ = ["BACKENDS", "Backend", "as_backend", "choose_backend"]

Backend = Literal["auto", "loops", "torch", "triton"]
BACKENDS = ("auto", "loops", "torch", "triton")

_NUM_RUNS = 5

_log = logging.getLogger("moecomm.nn")
_choices = Choices()
_chosen: dict[tuple[Any, ...], str] = {}


def as_backend(value: str) -> Backend:
    """Checks the name of a backend.

    Raises:
        ValueError: it is none of `BACKENDS`.
    """
    if value not in BACKENDS:
        raise ValueError(f"backend must be one of {list(BACKENDS)}, got {value!r}")
    return cast("Backend", value)


def choose_backend(
    requested: str, x: Tensor, rows: ExpertRows, gate_up_proj: Tensor, *, down_proj: Tensor, trains: bool
) -> str:
    """The backend for these tensors: "loops", "torch" or "triton".

    Arguments:
        requested: one of `BACKENDS`.
        x: `[N, H]`; flat: `[S, H]`.
        rows: which are whose.
        gate_up_proj, down_proj: as for `grouped_swiglu`.
        trains: whether gradients will be wanted; they are then part of what is measured.

    Raises:
        ValueError: the backend asked for cannot serve such tensors; the message says why.
    """
    if requested == "loops" or (requested == "auto" and x.device.type != "cuda"):
        return "loops"
    if requested != "auto":
        refusal = _refusal(requested, x, gate_up_proj, down_proj)
        if refusal is not None:
            raise ValueError(f"backend {requested!r} cannot compute these experts: {refusal}")
        return requested
    num_rows = -(-rows.num_rows // max(1, gate_up_proj.shape[0]))
    rows_per_expert = 1 << max(0, num_rows - 1).bit_length()
    layout = rows.layout if rows.gathered is None else f"flat, {rows.gathered.routes.shape[1]} choices"
    dtypes = (x.dtype, gate_up_proj.dtype, down_proj.dtype)
    family = (rows_per_expert, *gate_up_proj.shape, *dtypes, layout, rows.row_weights is not None, trains, x.device)
    known = _chosen.get(family)
    if known is not None:
        return known
    refusals = {name: _refusal(name, x, gate_up_proj, down_proj) for name in ("triton", "torch")}
    able = [name for name, refusal in refusals.items() if refusal is None]
    why = {name: refusal for name, refusal in refusals.items() if refusal is not None}
    if len(able) < 2:
        chosen = able[0] if able else "loops"
    elif rows.num_rows == 0 or gate_up_proj.shape[0] == 0 or torch.cuda.is_current_stream_capturing():
        return able[0]
    else:
        key = {
            "what": "experts",
            "family": [str(part) for part in family[:-1]],
            "device": torch.cuda.get_device_name(x.device),
            "versions": {name: expert_kernels_for(name).version for name in able},
        }
        chosen = _choices.choose(
            key, able, lambda name: _time(name, x, rows, gate_up_proj, down_proj=down_proj, trains=trains)
        )
    weights = list(gate_up_proj.shape)
    _log.info(
        "experts of %s rows each (%s), weights %s: %s (%s)", rows_per_expert, layout, weights, chosen, why or "measured"
    )
    return _chosen.setdefault(family, chosen)


def _refusal(name: str, x: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> str | None:
    try:
        return expert_kernels_for(name).refusal(x, gate_up_proj, down_proj)
    except ImportError as error:
        return str(error)


@torch.no_grad()
def _time(name: str, x: Tensor, rows: ExpertRows, gate_up_proj: Tensor, *, down_proj: Tensor, trains: bool) -> float:
    """Milliseconds of a forward, and a backward if `trains`: the median of some runs after one that is not counted."""
    kernels = expert_kernels_for(name)
    x = x.contiguous()
    stream = torch.cuda.current_stream(x.device)  # the current device may be another

    def run() -> None:
        y, hidden = kernels.outputs(x, rows, gate_up_proj, down_proj, out=None, keeps_hidden=trains)
        if hidden is not None:
            needs = (True, True, True, rows.row_weights is not None)
            kernels.gradients(y, x, rows, gate_up_proj, down_proj=down_proj, hidden=hidden, needs=needs)

    run()
    times: list[float] = []
    for _ in range(_NUM_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(stream)
        run()
        end.record(stream)
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[_NUM_RUNS // 2]
