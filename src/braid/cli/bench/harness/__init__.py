"""Starts the ranks of a benchmark, on this host or several, and takes turns between candidates."""
