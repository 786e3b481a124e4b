"""What the ranks of each benchmark run."""
