"""Pages that a network card was told of: they are not given back, whoever asks, until they are unpinned."""

import pytest

from moecomm import _C

PAGE = 4096


@pytest.mark.parametrize("make", ["private", "shared"])
def test_pinned_pages_are_not_given_back_until_they_are_unpinned(make):
    nbytes = 32 * PAGE
    mapping = _C.Mapping.create_private(nbytes) if make == "private" else _C.Mapping.create_shared("test", nbytes)
    mapping.close_fd()
    mapping.view(0, nbytes)[:] = b"\1" * nbytes
    mapping.pin(8 * PAGE, 4 * PAGE)
    mapping.pin(20 * PAGE, 4 * PAGE)
    mapping.punch(2 * PAGE, 20 * PAGE)  # one whole, half of the other
    wanted = [1] * 2 + [0] * 6 + [1] * 4 + [0] * 8 + [1] * 12
    assert [byte for byte in bytes(mapping.view(0, nbytes))[::PAGE]] == wanted
    assert (mapping.pinned_bytes(), mapping.is_unwanted(8 * PAGE), mapping.is_unwanted(20 * PAGE)) == (
        8 * PAGE,
        True,
        False,
    )
    mapping.clear(0, nbytes)
    assert not any(mapping.view(0, nbytes))
    mapping.unpin(8 * PAGE)
    mapping.unpin(20 * PAGE)
    mapping.view(0, nbytes)[:] = b"\1" * nbytes
    mapping.punch(0, nbytes)
    assert mapping.resident_bytes() == 0


def test_trim_counts_what_is_pinned_as_touched():
    mapping = _C.Mapping.create_private(64 * PAGE)
    arena = _C.Arena(mapping, 64 * PAGE)
    first, second = arena.allocate(8 * PAGE), arena.allocate(8 * PAGE)
    memoryview(first)[:] = memoryview(second)[:] = b"\1" * (8 * PAGE)
    mapping.pin(second.offset, 16 * PAGE)  # of which the arena has used a half
    del second
    assert arena.trim() == 0
    assert arena.usage().touched_bytes == 24 * PAGE
    assert bytes(mapping.view(8 * PAGE, 8 * PAGE)) == b"\1" * (8 * PAGE)
    assert mapping.is_unwanted(8 * PAGE)
    mapping.unpin(8 * PAGE)
    assert arena.trim() == 16 * PAGE
    assert arena.usage().touched_bytes == 8 * PAGE
    assert bytes(memoryview(first)) == b"\1" * (8 * PAGE)
