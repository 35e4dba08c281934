"""Which tile shape a product takes where it can be measured: the fastest, measured once per family, kept on disk."""

import math

import pytest
import torch

from moecomm.kernels.choices import Choices
from moecomm.kernels.triton import tile_shapes
from moecomm.kernels.triton.tile_shapes import candidate_shapes, choose_shape

CUDA = torch.device("cuda", 0)
FAMILY = {
    "compute": torch.bfloat16,
    "dtypes": (torch.bfloat16,) * 3,
    "rows_per_expert": 256,
    "sizes": (8, 7168, 4096),
    "device": CUDA,
}


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """As on a GPU: the shapes that are timed, of which the second is the fastest and the first cannot run."""
    asked = []

    def time(launch, values, device):
        assert device == CUDA
        launch(tile_shapes.TileShape(*values))
        asked.append(tile_shapes.TileShape(*values))
        return {1: math.inf, 2: 1.0}.get(len(asked), 5.0)

    monkeypatch.setattr(tile_shapes, "is_interpreted", lambda: False)
    monkeypatch.setattr(tile_shapes, "_capability", lambda device: 90)
    monkeypatch.setattr(tile_shapes, "_time", time)
    monkeypatch.setattr(tile_shapes, "_choices", Choices(tmp_path))
    monkeypatch.setattr(tile_shapes, "_chosen", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    return asked


def choose(kind="plain", **other):
    ran = []
    return choose_shape(kind, **{**FAMILY, **other}, launch=ran.append), ran


def test_the_fastest_is_measured_once_and_kept_on_disk(timed):
    candidates = candidate_shapes("plain", 2, 256, 90)
    chosen, ran = choose()
    assert timed == ran == candidates
    assert chosen == candidates[1]
    assert choose() == (chosen, [])
    tile_shapes._chosen.clear()  # as in the next process
    assert choose() == (chosen, [])


@pytest.mark.parametrize(
    "other",
    [{"kind": "swiglu"}, {"rows_per_expert": 512}, {"sizes": (8, 7168, 4096, 1)}, {"dtypes": (torch.float16,) * 3}],
)
def test_other_families_are_measured_anew(timed, other):
    choose()
    before = len(timed)
    choose(**other)
    assert len(timed) > before


def test_in_a_capture_nothing_is_measured_and_nothing_kept(timed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose() == (candidate_shapes("plain", 2, 256, 90)[0], [])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert choose()[0] == candidate_shapes("plain", 2, 256, 90)[1]
