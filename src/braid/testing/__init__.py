"""Worlds, faults and conformance suites for tests; nothing in braid imports this."""
