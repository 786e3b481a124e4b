"""Versions of braid and of torch, alone in a file so that building needs no import of torch."""

__version__ = "0.1.0"
TORCH_VERSIONS = ("2.10.0", "2.13.0", "2.14.1")  # that tests ran with, see docs/works_with.md
