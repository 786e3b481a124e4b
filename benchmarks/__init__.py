"""Benchmarks of braid against other systems: `python -m benchmarks zero`."""
