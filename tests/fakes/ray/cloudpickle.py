"""Ray's pickler, which is the standard library's here."""

from pickle import dumps, loads

__all__ = ["dumps", "loads"]
