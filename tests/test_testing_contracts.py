"""The contracts notice what they are for: broken implementations fail them. And comparisons say where."""

import ctypes

import pytest
import torch

from moecomm.codecs.none import NoCodec, PlainRows
from moecomm.kernels.cpu import CpuRowKernels
from moecomm.testing import RankFailure
from moecomm.testing.compare import assert_bitwise_equal, expect
from moecomm.testing.contracts import World, algorithm, codec, kernels, transport
from moecomm.testing.contracts.cases import cases_for
from moecomm.transports import registry
from moecomm.transports.local import LocalTransport

WORLD = World("threads", "broken", rank_counts=(1, 2, 3), timeout=20)


class PutsNextDoor(LocalTransport):
    def put(self, region, offset, address, nbytes, rank):
        super().put(region, min(offset + 1, region.nbytes - nbytes), address, nbytes, rank)


class SignalsTheWrongLane(LocalTransport):
    def lane(self, slot, source):
        return super().lane(slot, (source + 1) % self.num_ranks)


class WritesOutside(LocalTransport):
    def put(self, region, offset, address, nbytes, rank):
        ctypes.memmove(self._addresses[region.index][rank] + max(0, min(offset, 32)), address, nbytes)


class IsNotZero(LocalTransport):
    def allocate(self, nbytes):
        region = super().allocate(nbytes)
        if nbytes == 100_001:
            ctypes.memset(region.address + 100_000, 1, 1)
        return region


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (PutsNextDoor, transport.check_puts_arrive_where_they_were_sent),
        (SignalsTheWrongLane, transport.check_counters_add_up_per_source),
        (WritesOutside, transport.check_puts_outside_the_region_are_refused),
        (IsNotZero, transport.check_regions_are_symmetric_and_zero),
    ],
)
def test_a_broken_transport_is_noticed(broken, check, monkeypatch):
    monkeypatch.setitem(registry._known, "broken", f"{__name__}:{broken.__name__}")
    with pytest.raises(RankFailure, match="AssertionError"):
        check(WORLD)


def descending(self, out, routes, addresses, *, weights=None):
    flipped = None if weights is None else weights.flip(1).contiguous()
    combine_rows(self, out, routes.flip(1).contiguous(), addresses, weights=flipped)


combine_rows = CpuRowKernels.combine_rows


def test_a_sum_in_another_order_is_noticed(monkeypatch):
    monkeypatch.setattr(CpuRowKernels, "combine_rows", descending)
    with pytest.raises(AssertionError, match="combine_rows, .* elements differ; the first at"):
        kernels.check_combined_rows(CpuRowKernels())
    with pytest.raises(RankFailure, match=r"case '.*', rank \d of 1: (weighted )?combine: .* elements differ"):
        algorithm.check_against_the_oracle(World("threads", "local", rank_counts=(1,)))


def test_swapped_rows_are_noticed(monkeypatch):
    push_rows = CpuRowKernels.push_rows

    def swapped(self, rows, routes, addresses, *, weights=None):
        push_rows(self, rows.flip(0), routes, addresses, weights=weights)

    monkeypatch.setattr(CpuRowKernels, "push_rows", swapped)
    with pytest.raises(AssertionError, match="push_rows"):
        kernels.check_pushed_rows(CpuRowKernels())
    with pytest.raises(RankFailure, match="case 'odd number of experts', rank 0 of 1: dispatch: x: "):
        algorithm.check_against_the_oracle(World("threads", "local", rank_counts=(1,)))


def test_a_world_takes_the_cases_that_it_names(monkeypatch):
    monkeypatch.setattr(CpuRowKernels, "combine_rows", descending)
    only_bytes = [case for case in cases_for(1) if case.name == "bytes"]  # which are not summed
    algorithm.check_against_the_oracle(World("threads", "local", rank_counts=(1,), cases=lambda num_ranks: only_bytes))


class ForgetfulRows(PlainRows):
    def decode(self, buffer, offsets, num_rows):
        rows = super().decode(buffer, offsets, num_rows).clone()
        return rows.zero_() if num_rows == 1 else rows


class ForgetfulCodec(NoCodec):
    def row_format(self, hidden, dtype):
        return ForgetfulRows(hidden, dtype)


def test_a_lossy_codec_that_claims_exactness_is_noticed():
    codec.check_rows_come_back(NoCodec())
    with pytest.raises(AssertionError, match="torch.float64 x 1: decoded rows: "):
        codec.check_rows_come_back(ForgetfulCodec())


def test_differences_are_told_with_place_and_values():
    expected = torch.tensor([[1.0, 2.0], [float("nan"), 4.0]])
    same = expected.clone()
    assert_bitwise_equal(same, expected, "rows")
    other = expected.clone()
    other[1, 1] = 5.0
    with pytest.raises(
        AssertionError, match=r"^rows: 1 of 4 elements differ; the first at \[1, 1\]: got 5.0, expected 4.0$"
    ):
        assert_bitwise_equal(other, expected, "rows")


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bfloat16, torch.uint8, torch.int64])
def test_every_dtype_can_be_compared(dtype):
    rows = torch.arange(6).reshape(2, 3).to(torch.float32).to(dtype)
    assert_bitwise_equal(rows, rows.clone(), "rows")
    assert_bitwise_equal(rows[:0], rows[:0], "no rows")
    with pytest.raises(AssertionError, match="rows: 4 of 6 elements differ"):
        assert_bitwise_equal(rows, rows[:, [2, 1, 0]], "rows")


def test_zeros_of_either_sign_differ_in_their_bits():
    with pytest.raises(AssertionError, match="got -0.0, expected 0.0"):
        assert_bitwise_equal(torch.tensor([-0.0]), torch.tensor([0.0]), "zero")


def test_shape_dtype_and_absence_are_told():
    rows = torch.zeros(2, 3)
    with pytest.raises(AssertionError, match=r"rows: got \[2, 3\] float32, expected \[2, 3\] float64"):
        assert_bitwise_equal(rows, rows.double(), "rows")
    with pytest.raises(AssertionError, match=r"rows: got \[1, 3\] float32, expected \[2, 3\] float32"):
        assert_bitwise_equal(rows[:1], rows, "rows")
    with pytest.raises(AssertionError, match=r"rows: got None, expected \[2, 3\] float32"):
        assert_bitwise_equal(None, rows, "rows")
    assert_bitwise_equal(None, None, "rows")
    with pytest.raises(AssertionError, match="said so"):
        expect(False, "said so")
