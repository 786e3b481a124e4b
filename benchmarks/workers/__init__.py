"""What the ranks of the benchmarks run."""
