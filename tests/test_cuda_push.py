"""The bulk push on a device, against the reference; what it refuses, everywhere."""

import pytest
import torch
from kernel_cases import assert_same_bits, expert_ranks, fresh_memory, ids_of, plans

from moecomm.errors import TransportUnavailable
from moecomm.kernels import kernels_for
from moecomm.kernels.cuda.push_bulk import push_rows_in_bulk


def test_rows_on_the_cpu_are_refused():
    with pytest.raises(ValueError, match="rows is on cpu; wanted a CUDA device"):
        push_rows_in_bulk(torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.int64), [0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "routes", "addresses", "error", "message"),
    [
        (torch.zeros(4), torch.zeros(4, 1, dtype=torch.int64), [0], ValueError, "rows is"),
        (torch.zeros(4, 8)[:, ::2], torch.zeros(4, 1, dtype=torch.int64), [0], ValueError, "rows is"),
        (torch.zeros(4, 8), torch.zeros(4, 1, dtype=torch.int32), [0], TypeError, "routes is torch.int32"),
        (torch.zeros(4, 8), torch.zeros(3, 1, dtype=torch.int64), [0], ValueError, "routes is"),
        (torch.zeros(4, 8), torch.zeros(4, 1, dtype=torch.int64), torch.zeros(2), ValueError, "addresses is"),
    ],
)
def test_wrong_arguments_are_refused(rows, routes, addresses, error, message):
    device = torch.device("cuda")
    addresses = addresses.to(device) if isinstance(addresses, torch.Tensor) else addresses
    with pytest.raises(error, match=message):
        push_rows_in_bulk(rows.to(device), routes.to(device), addresses)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_tokens", "num_topk", "columns", "dtype", "offset"),
    [
        (1, 1, 8, torch.bfloat16, 0),
        (1000, 8, 7168, torch.bfloat16, 0),
        (33, 40, 128, torch.float16, 0),
        (700, 4, 20480, torch.float32, 0),  # rows of several pieces
        (50, 3, 7, torch.bfloat16, 0),
        (50, 3, 64, torch.bfloat16, 2),
        (0, 2, 64, torch.bfloat16, 0),
    ],
)
def test_rows_arrive_as_by_the_reference(num_tokens, num_topk, columns, dtype, offset):
    device = torch.device("cuda")
    num_ranks = 3
    plan = plans(ids_of(num_tokens, num_topk, 6), expert_ranks(6, num_ranks), num_ranks, "expert_major")
    raw = torch.randint(0, 256, (num_tokens, columns * dtype.itemsize), generator=torch.Generator().manual_seed(1))
    rows = raw.to(torch.uint8).view(dtype)
    want = fresh_memory(plan.num_rows, columns, dtype, offset=offset)
    got = torch.full_like(want.bytes, 0xA5, device=device)
    addresses = [address - want.bytes.data_ptr() + got.data_ptr() for address in want.addresses]
    kernels_for("reference").push_rows(rows, plan.routes, want.addresses)
    try:
        push_rows_in_bulk(rows.to(device), plan.routes.to(device), addresses)
    except TransportUnavailable as missing:
        pytest.skip(str(missing))
    assert_same_bits(got.cpu(), want.bytes)
