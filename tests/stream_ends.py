"""Ways for a rank to end, or to stop for a while, in the middle of a stream between domains."""

import os
import signal

__all__ = ["CUTS", "die", "when_sending", "when_taking", "when_waiting"]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def when_taking(comm, number, action):
    """Calls `action` before this rank takes out its next chunk but `number`."""
    _before(_channels(comm), "take", number, action)


def when_sending(comm, number, action):
    """Calls `action` before this rank sends its next chunk but `number`."""
    _before(_channels(comm), "send", number, action)


def when_waiting(comm, number, action):
    """Calls `action` before this rank waits for the next time but `number` until a stream can go on."""
    _before(comm._exchanger.session.transport, "wait_traffic", number, action)


# What the rank is to others just then: one who passes their rows on, one who sends, one who waits for rows.
CUTS = {"rail": when_taking, "source": when_sending, "receiver": when_waiting}


def _channels(comm):
    return comm._exchanger.session.algorithms["throughput"].channels


def _before(owner, name, number, action):
    method, left = getattr(owner, name), [number]

    def counted(*arguments, **options):
        left[0] -= 1
        if left[0] == 0:
            action()
        return method(*arguments, **options)

    setattr(owner, name, counted)
