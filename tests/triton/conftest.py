"""Triton kernels, interpreted, here and in child processes: the conftest.py above sets TRITON_INTERPRET."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
