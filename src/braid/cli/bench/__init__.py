"""bench: benchmarks that compare several candidates in one run, in turns."""
