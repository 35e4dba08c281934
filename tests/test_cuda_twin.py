"""csrc/cuda/push_bulk.cu itself, compiled for the CPU over an emulated copy engine, against the reference push.

The engine completes copies as late as it may (tests/cuda/emulation). Kernels that wait for too little are caught.
"""

import pytest
import torch
from bulk_twin import COMPILER, ROOT, build, push
from kernel_cases import assert_same_bits, expert_ranks, fresh_memory, ids_of, plans

from moecomm.kernels import kernels_for
from moecomm.kernels.base import make_route
from moecomm.kernels.cuda.push_bulk import choose_launch

pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")]


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    return build(tmp_path_factory.mktemp("twin"))


def pushed(library, rows, plan, columns, *, offset=0, **rest):
    """The memory of all ranks after the twin and after the reference, gaps and poison included."""
    memories = []
    for mine in (True, False):
        memory = fresh_memory(plan.num_rows, columns, rows.dtype, offset=offset)
        if mine:
            assert push(library, rows, plan.routes, memory.addresses, **rest) == ""
        else:
            kernels_for("reference").push_rows(rows, plan.routes, memory.addresses)
        # Both begin at the same place of a 16-byte line, or the same offset would be a different case.
        assert memory.bytes.data_ptr() % 16 == 0
        memories.append(memory.bytes)
    return memories


def rows_of(num_tokens, columns, dtype, *, stride=None, shift=0):
    """Rows of random bytes, `stride` elements apart, `shift` elements from an aligned address."""
    generator = torch.Generator().manual_seed(num_tokens * 1000 + columns)
    stride = stride or columns
    raw = torch.randint(0, 256, ((num_tokens * stride + shift) * dtype.itemsize,), generator=generator)
    flat = raw.to(torch.uint8).view(dtype)[shift:]
    return flat.as_strided((num_tokens, columns), (stride, 1), flat.storage_offset())


def plan_of(num_tokens, num_topk, *, num_experts=6, num_ranks=3, layout="expert_major"):
    return plans(ids_of(num_tokens, num_topk, num_experts), expert_ranks(num_experts, num_ranks), num_ranks, layout)


@pytest.mark.parametrize("layout", ["expert_major", "flat"])
@pytest.mark.parametrize(
    ("num_tokens", "num_topk", "columns", "piece_bytes"),
    [
        (1, 1, 8, None),
        (9, 3, 128, None),
        (33, 4, 64, 64),  # rows of two pieces: many pieces per stage
        (5, 40, 24, 16),  # more slots than threads
        (7, 8, 4104, 4096),  # the last piece is short
        (0, 4, 64, None),
    ],
)
def test_rows_arrive_as_by_the_reference(twin, layout, num_tokens, num_topk, columns, piece_bytes):
    plan = plan_of(num_tokens, num_topk, layout=layout)
    rows = rows_of(num_tokens, columns, torch.bfloat16)
    assert_same_bits(*pushed(twin, rows, plan, columns, piece_bytes=piece_bytes))


@pytest.mark.parametrize(
    ("columns", "dtype", "stride", "shift", "offset"),
    [
        (7, torch.bfloat16, None, 0, 0),  # row bytes
        (12, torch.float16, None, 0, 0),
        (9, torch.float64, None, 0, 0),
        (5, torch.uint8, None, 0, 0),
        (64, torch.bfloat16, 65, 0, 0),  # stride
        (64, torch.bfloat16, 72, 0, 0),  # aligned rows with gaps: the engine
        (64, torch.float32, None, 1, 0),  # source address
        (64, torch.bfloat16, None, 0, 8),  # destinations: each a case of its own
        (64, torch.bfloat16, None, 0, 4),
        (64, torch.bfloat16, None, 0, 2),
        (64, torch.uint8, None, 0, 1),
    ],
)
def test_what_is_not_a_multiple_of_16_takes_the_plain_path(twin, columns, dtype, stride, shift, offset):
    plan = plan_of(11, 3)
    rows = rows_of(11, columns, dtype, stride=stride, shift=shift)
    assert_same_bits(*pushed(twin, rows, plan, columns, offset=offset))


def test_one_destination_that_the_engine_cannot_write_does_not_spoil_the_others(twin):
    rows = rows_of(40, 32, torch.float32)
    routes = torch.tensor([[make_route(0, t), -1, make_route(1, t), make_route(0, 40 + t)] for t in range(40)])
    memory = torch.full((256 + 120 * 128,), 0xA5, dtype=torch.uint8)
    addresses = [memory.data_ptr() + 64, memory.data_ptr() + 64 + 80 * 128 + 4]
    want = torch.full_like(memory, 0xA5)
    shift = want.data_ptr() - memory.data_ptr()
    kernels_for("reference").push_rows(rows, routes, [address + shift for address in addresses])
    assert push(twin, rows, routes, addresses) == ""
    assert_same_bits(memory, want)


@pytest.mark.parametrize("num_blocks", [1, 3, 20])
@pytest.mark.parametrize("seed", range(4))
def test_any_number_of_blocks_and_any_delay(twin, num_blocks, seed):
    plan = plan_of(17, 5)
    rows = rows_of(17, 48, torch.float32)
    assert_same_bits(*pushed(twin, rows, plan, 48, num_blocks=num_blocks, piece_bytes=64, seed=seed))


@pytest.mark.parametrize("columns", [64, 7])
def test_rows_beyond_32_bits_are_reached(twin, columns):
    plan = plan_of(9, 3)
    rows = rows_of(9, columns, torch.bfloat16)
    first = (1 << 33) + 5  # that so many rows lie before these is all that the kernel can know
    memory, want = (fresh_memory(plan.num_rows, columns, rows.dtype) for _ in range(2))
    kernels_for("reference").push_rows(rows, plan.routes, want.addresses)
    far = [address - first * columns * rows.element_size() for address in memory.addresses]
    routes = torch.where(plan.routes < 0, plan.routes, plan.routes + first)
    assert push(twin, rows, routes, far) == ""
    assert_same_bits(memory.bytes, want.bytes)


def test_no_routes_write_nothing(twin):
    routes = torch.full((6, 3), -1)
    assert push(twin, rows_of(6, 64, torch.float32), routes, [0]) == ""


@pytest.mark.parametrize("columns", [64, 7])
@pytest.mark.parametrize("failed", [0, 3])
def test_after_a_failed_wait_nothing_is_written(twin, columns, failed):
    plan = plan_of(9, 3)
    rows = rows_of(9, columns, torch.bfloat16)
    status = torch.tensor([failed, 5, 6, 7, 8])
    got, want = (fresh_memory(plan.num_rows, columns, rows.dtype) for _ in range(2))
    if not failed:
        kernels_for("reference").push_rows(rows, plan.routes, want.addresses)
    assert push(twin, rows, plan.routes, got.addresses, status=status) == ""
    assert_same_bits(got.bytes, want.bytes)


BROKEN = {
    "ends before its stores are written": ("    bulk_wait();\n", ""),
    "uses a stage again before it was read": ("bulk_wait_read<kBehind>();", ""),
    "waits for too few groups": ("bulk_wait_read<kBehind>();", "bulk_wait_read<kBehind + 1>();"),
    "one thread does not wait for the others": ("            __syncwarp();  // lane 0", "            // lane 0"),
    "stores before the load has arrived": ("while (!arrival_ended(", "if (!arrival_ended("),
    "looks for the wrong phase": ("(i / kStages % 2)", "(0)"),
    "does not tell the engine of its arrivals": ("        arrivals_ready();\n", ""),
    "loads too far ahead": ("kAhead = kStages - kBehind", "kAhead = kStages"),
    "stores past the end of a row": ("bulk_store(to, buffer, piece.bytes)", "bulk_store(to, buffer, piece.bytes + 16)"),
    "pushes after a failed wait": ("status[kFailed] != 0", "status[kFailed] < 0"),
    "forgets the last slot": ("p < num_slots; p += kWarp", "p < num_slots - 1; p += kWarp"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_kernel_that_is_broken_is_caught(tmp_path, name):
    source = (ROOT / "csrc/cuda/push_bulk.cu").read_text(encoding="utf-8")
    before, after = BROKEN[name]
    assert source.count(before) == 1, f"{name}: push_bulk.cu no longer has {before!r} once"
    library = build(tmp_path, source.replace(before, after))
    plan = plan_of(60, 5)
    rows = rows_of(60, 48, torch.float32)
    want = fresh_memory(plan.num_rows, 48, rows.dtype)
    kernels_for("reference").push_rows(rows, plan.routes, want.addresses)
    if name == "pushes after a failed wait":
        untouched = fresh_memory(plan.num_rows, 48, rows.dtype)
        push(library, rows, plan.routes, untouched.addresses, piece_bytes=64, status=torch.tensor([1]))
        assert (untouched.bytes == want.bytes).all(), "the same program without the look at the status"
        return
    for seed in range(5):
        memory = fresh_memory(plan.num_rows, 48, rows.dtype)
        failure = push(library, rows, plan.routes, memory.addresses, piece_bytes=64, seed=seed)
        if failure or not torch.equal(memory.bytes, want.bytes):
            return
    pytest.fail(f"push_bulk.cu that {name} passes")


@pytest.mark.parametrize("row_bytes", [0, 1, 16, 14336, 16384, 16400, 57344, 100001])
def test_pieces_fit_and_cover_a_row(row_bytes):
    num_blocks, piece_bytes, shared_bytes = choose_launch(4096, row_bytes, 132)
    assert num_blocks == 396
    assert piece_bytes % 16 == 0
    assert 16 <= piece_bytes <= 16384
    assert 3 * (shared_bytes + 1024) <= 227 * 1024
    num_pieces = -(-row_bytes // piece_bytes)
    assert num_pieces == -(-row_bytes // 16384)
    assert num_pieces * piece_bytes - row_bytes < 16 * max(1, num_pieces)


def test_few_tokens_take_few_blocks():
    assert choose_launch(5, 1024, 132).num_blocks == 5
