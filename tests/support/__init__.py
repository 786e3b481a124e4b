"""testing: worlds, faults and conformance suites for tests; no other room of braid imports it."""
