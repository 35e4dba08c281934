"""Codecs by name; imported when asked for."""

from __future__ import annotations

import importlib

from moecomm.codecs.base import Codec
from moecomm.kernels.base import RowKernels

__all__ = ["codec_names", "make_codec", "register"]

_known: dict[str, str] = {"none": "moecomm.codecs.none:NoCodec"}


def codec_names() -> list[str]:
    """All names."""
    return list(_known)


def register(name: str, path: str) -> None:
    """Adds a codec.

    Arguments:
        name: its name.
        path: `module:Class`, imported when asked for.

    Raises:
        ValueError: if the name is taken.
    """
    if name in _known:
        raise ValueError(f"name: a codec {name!r} is registered already")
    _known[name] = path


def make_codec(name: str, kernels: RowKernels | None = None) -> Codec:
    """The codec of this name.

    Arguments:
        name: its name.
        kernels: of the device on which rows are; None: of the CPU.

    Raises:
        ValueError: if there is none.
    """
    if name not in _known:
        raise ValueError(f"codec: unknown {name!r}; available: {', '.join(_known)}")
    module, _, attribute = _known[name].partition(":")
    codec: Codec = getattr(importlib.import_module(module), attribute)(kernels)
    return codec
