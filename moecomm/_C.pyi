"""Types of the native module. Addresses, sizes and counts are plain integers; see csrc for what each function does."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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
def plan_exchange(
    counts: npt.NDArray[np.int32],
    first_expert: npt.NDArray[np.int64],
    rank: int,
    order: int,
    alignment: int,
    capacity: int,
    /,
) -> tuple[npt.NDArray[np.int64], list[int], npt.NDArray[np.int32], npt.NDArray[np.int32], int, int, int, int]: ...
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
    value_bytes: int,
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
def pull_values(
    out: int, value_bytes: int, routes: int, num_tokens: int, num_slots: int, addresses: Sequence[int], /
) -> None: ...
def push_flat_metadata(
    topk_idx: int,
    is_int64: bool,
    num_tokens: int,
    num_topk: int,
    expert_rank: int,
    expert_local: int,
    num_experts: int,
    weights: int,
    value_bytes: int,
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
def push_values(
    values: int, value_bytes: int, routes: int, num_tokens: int, num_slots: int, addresses: Sequence[int], /
) -> None: ...
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

# cpu: low-latency messages (csrc/cpu/eager.h)

def send_eager(
    topk_idx: int,
    is_int64: bool,
    num_tokens: int,
    num_topk: int,
    expert_rank: int,
    num_experts: int,
    rows: int,
    stride_bytes: int,
    row_bytes: int,
    values: int,
    value_bytes: int,
    windows: Sequence[int],
    ids_out: int,
    /,
) -> int: ...
def receive_eager(
    windows: Sequence[int],
    num_tokens: Sequence[int],
    expert_rank: int,
    expert_local: int,
    num_experts: int,
    rank: int,
    domain_experts: int,
    domain_sources: int,
    num_topk: int,
    row_bytes: int,
    value_bytes: int,
    capacity: int,
    alignment: int,
    num_rows: int,
    rows: int,
    values: int,
    used: int,
    counts: int,
    routes: int,
    num_tokens_per_expert: int,
    offsets: int,
    tokens_per_expert: int,
    /,
) -> tuple[int, int, int]: ...
def copy_expert_rows(
    out: int,
    src: int,
    row_bytes: int,
    counts: int,
    num_ranks: int,
    num_experts: int,
    first_expert: int,
    num_local: int,
    capacity: int,
    alignment: int,
    /,
) -> None: ...

# memory

class Mapping:
    """A range of address space, private or shared by memfd."""

    @staticmethod
    def create_private(nbytes: int) -> Mapping: ...
    @staticmethod
    def create_shared(label: str, nbytes: int) -> Mapping: ...
    @staticmethod
    def open_peer(pid: int, fd: int, nbytes: int) -> Mapping: ...
    @staticmethod
    def borrow(address: int, nbytes: int, owner: object) -> Mapping: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def fd(self) -> int: ...
    def close_fd(self) -> None: ...
    def punch(self, offset: int, nbytes: int) -> None: ...
    def clear(self, offset: int, nbytes: int) -> None: ...
    def pin(self, offset: int, nbytes: int) -> None: ...
    def unpin(self, offset: int) -> None: ...
    def pinned_bytes(self) -> int: ...
    def is_unwanted(self, offset: int) -> bool: ...
    def resident_bytes(self) -> int: ...
    def view(self, offset: int, nbytes: int) -> memoryview: ...

class Block:
    """One block of an arena; returns to it when this dies. Offers the buffer protocol."""

    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...

class ArenaUsage:
    """What an arena holds, in bytes; see csrc/memory/arena.h."""

    live_bytes: int
    live_blocks: int
    peak_bytes: int
    touched_bytes: int
    limit: int
    num_allocations: int

class Arena:
    """Blocks of one mapping, lowest address first."""

    def __init__(self, mapping: Mapping, limit: int, begin: int = 0, nbytes: int | None = None) -> None: ...
    def allocate(self, nbytes: int) -> Block | None: ...
    def trim(self) -> int: ...
    def usage(self) -> ArenaUsage: ...

# sync

def read_cards(
    address: int,
    stride_bytes: int,
    num_ranks: int,
    num_agreed: int,
    refused: int,
    recording: int,
    first: int,
    num_columns: int,
    bases: Sequence[int],
    /,
) -> tuple[int, list[list[int]]]: ...
def file_cards(sources: Sequence[int], targets: Sequence[int], nbytes: int, sequence: int, /) -> None: ...

class SignalBoard:
    """Counters by which ranks tell each other how far they are; see csrc/sync/board.h."""

    @staticmethod
    def board_bytes(num_ranks: int, num_slots: int) -> int: ...
    def __init__(
        self, rank: int, num_slots: int, boards: list[int], pids: list[int], spin_ns: int, mappings: list[Mapping]
    ) -> None: ...
    def signal(self, peer: int, slot: int, n: int) -> None: ...
    def signal_all(self, slot: int, n: int) -> None: ...
    def total(self, slot: int) -> int: ...
    def traffic(self, first_slot: int, num_slots: int) -> int: ...
    def wait_traffic(self, first_slot: int, num_slots: int, beyond: int, timeout: float) -> int: ...
    def post(self, source: int, nbytes: int, destinations: list[int], offset: int, slot: int, n: int) -> None: ...
    def wait(self, slot: int, at_least: int, timeout: float) -> int: ...
    def reached(self, slot: int, at_least: int) -> bool: ...
    def wait_at(self, slot: int, lanes: Sequence[tuple[int, int]], at_least: int, timeout: float) -> int: ...
    def lane(self, slot: int, source: int) -> int: ...
    def lane_at(self, slot: int, rank: int, source: int) -> int: ...
    def waited_ns(self) -> list[int]: ...
    def longest_wait_ns(self) -> list[int]: ...
    def gone(self) -> list[int]: ...
    def process_alive(self, peer: int) -> bool: ...
    def depart(self) -> None: ...
    def mark_departed(self, peer: int) -> None: ...

UCX_API_VERSION: tuple[int, int]

class UcxWire:
    """One rank's end of the connections that UCX makes; see csrc/transport/ucx.h."""

    def __init__(self, library: str, rank: int, num_ranks: int, board: SignalBoard, yields: bool) -> None: ...
    def address(self) -> bytes: ...
    def connect(self, addresses: list[bytes], secret: bytes) -> None: ...
    def greeted(self, timeout: float) -> list[int]: ...
    def lanes(self, peer: int) -> list[str]: ...
    def allow_one_sided(self, peer: int, least_bytes: int) -> None: ...
    def withhold_memory(self) -> None: ...
    def num_one_sided(self, peer: int) -> int: ...
    def registered_bytes(self) -> int: ...
    def set_region(self, index: int, mapping: Mapping) -> None: ...
    def put(
        self, peer: int, region: int, offset: int, source: int, nbytes: int, slot: int, n: int, timeout: float
    ) -> bool: ...
    def signal(self, peer: int, slot: int, n: int, timeout: float) -> bool: ...
    def flush(self, timeout: float) -> list[int]: ...
    def close(self, timeout: float) -> None: ...
    def notes(self) -> list[str]: ...
