"""Parsing and checks of arguments: numbers of bytes, files to write."""

from __future__ import annotations

from braid.errors import ConfigError

__all__ = ["bytes_in", "check_place"]

KILO = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}


def bytes_in(text: str) -> int:
    """Parse a number of bytes such as `64Mi`, `1.5G` or `1000`."""
    digits = text.rstrip("bB").rstrip("iIkKmMgGtT")
    unit = text.rstrip("bB")[len(digits) :].lower()
    try:
        nbytes = round(float(digits) * KILO[unit])
    except (ValueError, KeyError, OverflowError):
        nbytes = -1
    if nbytes < 0:
        msg = f"a number of bytes must be written like 1000, 64Ki or 1.5G, got {text!r}"
        raise ConfigError(msg)
    return nbytes


def check_place(file: str, *, is_directory: bool = False) -> None:
    """Raise ConfigError if a file, or a directory for files, cannot be written."""
    import os
    from pathlib import Path

    path = Path(file)
    problem = "it is a directory" if path.is_dir() and not is_directory else ""
    if is_directory:
        path = next(place for place in (path, *path.parents) if place.exists())
        problem = "" if path.is_dir() else f"{path} is a file"
    if not problem and not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "the directory does not exist, or you have no permission to write to it"
    if problem:
        msg = f"{file} cannot be written: {problem}"
        raise ConfigError(msg)
