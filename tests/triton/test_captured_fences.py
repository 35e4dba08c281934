"""No kernel of calls that a CUDA graph can hold reads or writes outside of what ranks, which go in step, have given."""

from captured_replay import MODULES
from interpreter_fences import fences
from test_gpu_benchmark import check_captured, context_of


def test_captured_kernels_stay_within_their_memory(monkeypatch):
    with fences(monkeypatch, follows_addresses=True) as fence:
        assert {wrong for *_, wrong in check_captured.check(context_of("checks"))} == {0}
    captured = [module for module in MODULES if module.__name__.split(".")[-1].startswith("captured_")]
    assert {case.kernel.fn.__name__ for module in captured for case in module.compile_cases()} <= fence.kernels
