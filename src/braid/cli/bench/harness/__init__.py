"""Starts the ranks of a benchmark, on one or several hosts, and alternates between candidates."""
