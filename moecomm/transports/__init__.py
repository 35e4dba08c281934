"""Transports: how a peer is reached. They know bytes and counters, no tokens, experts or dtypes."""
