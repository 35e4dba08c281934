"""What holds for every test: cheap ones first, slow ones last, GPU tests only where there is a GPU.

A test that hangs is ended by `faulthandler_timeout` (pyproject.toml) with the stacks of all threads.
"""

import os

# Before anything imports Triton, torch included: kernels are interpreted. On a machine with a GPU, say 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from hypothesis import settings

settings.register_profile("moecomm", deadline=None)  # a machine that is shared is late at times
settings.load_profile("moecomm")


def pytest_collection_modifyitems(items):
    # Stable: within a class of cost the files stay in their order.
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def _few_torch_threads():
    """Ranks that are threads share the cores; torch's own threads would only get in their way."""
    torch.set_num_threads(1)
