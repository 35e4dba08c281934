"""Types of the native module. Addresses, sizes and counts are plain integers; see csrc for what each function does."""

from collections.abc import Sequence

# cpu: rows, values and ids (csrc/cpu)

def combine_rows(
    out: int,
    num_tokens: int,
    num_columns: int,
    format: int,
    routes: int,
    num_slots: int,
    addresses: Sequence[int],
    weights: int,
    /,
) -> None: ...
def count_routes(
    topk_idx: int,
    is_int64: bool,
    num_tokens: int,
    num_topk: int,
    expert_rank: int,
    num_experts: int,
    num_ranks: int,
    counts: int,
    /,
) -> int: ...
def cpu_features() -> dict[str, bool]: ...
def instruction_set() -> str: ...
def plan_expert_major(
    topk_idx: int,
    is_int64: bool,
    num_tokens: int,
    num_topk: int,
    expert_rank: int,
    num_experts: int,
    bases: int,
    routes: int,
    /,
) -> None: ...
def plan_flat(
    topk_idx: int,
    is_int64: bool,
    num_tokens: int,
    num_topk: int,
    expert_rank: int,
    num_experts: int,
    num_ranks: int,
    bases: int,
    routes: int,
    /,
) -> None: ...
def pull_flat_values(
    out: int,
    topk_idx: int,
    is_int64: bool,
    num_tokens: int,
    num_topk: int,
    expert_rank: int,
    num_experts: int,
    routes: int,
    num_slots: int,
    addresses: Sequence[int],
    /,
) -> None: ...
def pull_values(out: int, routes: int, num_tokens: int, num_slots: int, addresses: Sequence[int], /) -> None: ...
def push_flat_metadata(
    topk_idx: int,
    is_int64: bool,
    num_tokens: int,
    num_topk: int,
    expert_rank: int,
    expert_local: int,
    num_experts: int,
    weights: int,
    routes: int,
    num_slots: int,
    idx_addresses: Sequence[int],
    weight_addresses: Sequence[int],
    /,
) -> None: ...
def push_rows(
    rows: int,
    stride_bytes: int,
    num_rows: int,
    row_bytes: int,
    routes: int,
    num_slots: int,
    addresses: Sequence[int],
    /,
) -> None: ...
def push_values(values: int, routes: int, num_tokens: int, num_slots: int, addresses: Sequence[int], /) -> None: ...
def push_weighted_rows(
    rows: int,
    stride_bytes: int,
    num_rows: int,
    row_bytes: int,
    format: int,
    routes: int,
    num_slots: int,
    addresses: Sequence[int],
    weights: int,
    /,
) -> None: ...
def scale_dot(
    scaled: int, dots: int, g: int, y: int, weights: int, num_rows: int, num_columns: int, format: int, /
) -> None: ...
def set_instruction_set(name: str, /) -> None: ...
def stream_copy(out: int, src: int, num_bytes: int, /) -> None: ...
def stream_read(src: int, num_bytes: int, /) -> int: ...
def stream_scatter(out: int, src: int, num_rows: int, row_bytes: int, num_copies: int, /) -> None: ...
