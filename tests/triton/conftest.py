"""Triton kernels, interpreted: the variable must be set before anything imports Triton, here and in child processes."""

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="Triton is not installed")
