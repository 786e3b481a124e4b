"""Formatting of numbers with units, with at most three digits."""

from __future__ import annotations

__all__ = [
    "bytes_text",
    "count_text",
    "duration_text",
    "number_text",
    "percent_text",
    "seconds_text",
]


def duration_text(duration_ns: float) -> str:
    """Format a duration: `850 ns`, `12.4 ms`, `3.2 s`, `2 min 5 s`, `1 h 3 min`."""
    if duration_ns >= 3600e9:
        minutes = round(duration_ns / 60e9)
        return f"{minutes // 60} h {minutes % 60} min"
    if duration_ns >= 99.95e9:
        seconds = round(duration_ns / 1e9)
        return f"{seconds // 60} min {seconds % 60} s"
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if duration_ns >= size * 0.9995:
            return f"{number_text(duration_ns / size)} {unit}"
    return f"{duration_ns:.0f} ns"


def seconds_text(duration_s: float) -> str:
    """Format a duration in seconds as `duration_text` does."""
    return duration_text(duration_s * 1e9)


def bytes_text(nbytes: float) -> str:
    """Format a size: `0 B`, `512 B`, `1.5 KiB`, `64 MiB`."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{number_text(nbytes / size)} {unit}"
    return f"{nbytes:.0f} B"


def count_text(count: float) -> str:
    """Format a count for axes and totals: `950`, `12.4k`, `3.2M`."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size * 0.9995:
            return f"{number_text(count / size)}{unit}"
    return number_text(count)


def percent_text(fraction: float) -> str:
    """Format a fraction: `0 %`, `0.4 %`, `12 %`; `< 0.1 %` for smaller positive fractions."""
    percent = 100 * fraction
    if 0 < percent < 0.1:
        return "< 0.1 %"
    return f"{percent:.1f} %" if 0 < percent < 1 else f"{percent:.0f} %"


def number_text(value: float) -> str:
    """Format a number with three digits, without trailing zeros: `0.0123`, `1.5`, `12.4`, `950`."""
    if value == 0:
        return "0"
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    text = f"{value:.3g}"
    if "e" in text:
        return text
    return text.rstrip("0").rstrip(".") if "." in text else text
