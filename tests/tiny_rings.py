"""Channels so small that a few rows fill them: many chunks, rings that wrap around, sources that wait for credit."""

import contextlib

import pytest

from moecomm.algorithms import channels

__all__ = ["tiny_rings"]


@contextlib.contextmanager
def tiny_rings(num_places=2, most_rows=2, credit_parts=8):
    """Communicators made inside have rings of `num_places` chunks of at most `most_rows` entries.

    Credit is given for that part of a ring at once; 1 = when all of it is empty.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels, "_LARGEST_CHUNK", 1)
        patch.setattr(channels, "_FEWEST_PLACES", num_places)
        patch.setattr(channels, "_MOST_PLACES", num_places)
        patch.setattr(channels, "_CREDIT_PARTS", credit_parts)
        made = channels.ChunkForm.__init__

        def make_small(self, chunk_bytes, entry_bytes, most=2**31):
            made(self, chunk_bytes, entry_bytes, min(most, most_rows))

        patch.setattr(channels.ChunkForm, "__init__", make_small)
        yield
