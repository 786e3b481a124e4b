"""Checks that a user-given step count is an integer."""

from __future__ import annotations

from numbers import Integral

__all__ = ["is_whole"]


def is_whole(number: object, least: int) -> bool:
    """Return whether `number` is an integer of any integral type and at least `least`.

    >>> is_whole(1, 1), is_whole(0, 1), is_whole(2.5, 1), is_whole("2", 1)
    (True, False, False, False)
    """
    return isinstance(number, Integral) and int(number) >= least
