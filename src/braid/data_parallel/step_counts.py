"""Numbers of steps that users say: 2.5 is none, and is found late or never by arithmetic that takes it."""

from __future__ import annotations

from numbers import Integral

__all__ = ["is_whole"]


def is_whole(number: object, least: int) -> bool:
    """Whether it is a whole number, of whatever type, from `least`.

    >>> is_whole(1, 1), is_whole(0, 1), is_whole(2.5, 1), is_whole("2", 1)
    (True, False, False, False)
    """
    return isinstance(number, Integral) and int(number) >= least
