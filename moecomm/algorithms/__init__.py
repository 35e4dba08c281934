"""Algorithms: who sends what to whom, in which order. They know slots and counters, no transport by name."""
