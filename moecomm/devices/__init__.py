"""Devices: where tensors live, and in which order work on them is done."""
