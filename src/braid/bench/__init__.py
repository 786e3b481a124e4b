"""Measurements whose figures matter; they are never tests. Each compares within one run, in turns."""
