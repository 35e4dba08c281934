"""Launches of captured calls, kept and made again, as a CUDA graph does."""

import contextlib

from moecomm.kernels.triton import (
    captured_announce,
    captured_answers,
    captured_cards,
    captured_combine,
    captured_messages,
    captured_plan,
    captured_ready,
    captured_rows,
    captured_send,
    captured_static,
    captured_zeros,
    counts,
    flat,
    gradients,
    plans,
    push,
    runtime,
    values,
)

MODULES = [captured_announce, captured_combine, captured_messages, captured_plan, captured_rows, captured_send]
MODULES += [captured_cards, captured_ready, captured_static, captured_zeros, counts, flat, plans, push]
MODULES += [captured_answers, gradients, values]


@contextlib.contextmanager
def recorded():
    """Launches of captured calls are not made but kept, as a graph does: kernels and arguments, the very same ones."""
    launches = []

    def keep(*args, **constants):
        launches.append((args, constants))

    for module in MODULES:
        module.launch = keep
    try:
        yield launches
    finally:
        for module in MODULES:
            module.launch = runtime.launch


def replay(launches):
    for args, constants in launches:
        runtime.launch(*args, **constants)
