"""bench: measurements whose figures matter; each compares candidates within one run, in turns."""
