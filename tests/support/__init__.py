"""support: worlds, faults and conformance suites for tests."""
