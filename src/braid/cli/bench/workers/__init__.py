"""The programs that the ranks of each benchmark run."""
