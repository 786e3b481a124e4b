"""Benchmarks of braid beside other systems: `python -m benchmarks zero`."""
