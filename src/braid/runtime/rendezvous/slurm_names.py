"""Slurm's short forms of lists: `n[1-3,07],x5` for nodes, `4(x2),1` for numbers."""

from __future__ import annotations

import re
from typing import NoReturn

from braid.errors import ConfigError

__all__ = ["expand_counts", "expand_hostlist"]

MOST_NAMES = 1 << 16
COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
PART = re.compile(r"([^\[\],]*)(?:\[([\d,-]*)\](.*))?")
RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def expand_hostlist(text: str) -> list[str]:
    """Return the names of a list of nodes.

    Raises:
        ConfigError: The text is not a list of nodes.

    >>> expand_hostlist("n[1-2,07-08]-ib,x5")
    ['n1-ib', 'n2-ib', 'n07-ib', 'n08-ib', 'x5']
    """
    names = [
        name
        for part in (re.split(r",(?![^\[]*\])", text) if text else ())
        for name in _expanded(part, text)
    ]
    if len(names) > MOST_NAMES or not all(names):
        _refuse(text)
    return names


def expand_counts(text: str) -> list[int]:
    """Return numbers of tasks or processors by node.

    Raises:
        ConfigError: The text is not a list of numbers.

    >>> expand_counts("4(x2),1")
    [4, 4, 1]
    """
    counts: list[int] = []
    for part in text.split(",") if text else ():
        matched = COUNT.fullmatch(part)
        if matched is None or int(matched[2] or 1) > MOST_NAMES:
            _refuse(text)
        else:
            counts += [int(matched[1])] * int(matched[2] or 1)
    return counts


def _expanded(part: str, text: str) -> list[str]:
    """Return the names of one part; the last bracket varies fastest."""
    matched = PART.fullmatch(part)
    if matched is None:
        _refuse(text)
    prefix, ranges, rest = matched.groups()
    if ranges is None:
        return [prefix]
    numbers = [number for piece in ranges.split(",") for number in _numbers(piece, text)]
    return [prefix + number + suffix for number in numbers for suffix in _expanded(rest, text)]


def _numbers(piece: str, text: str) -> list[str]:
    matched = RANGE.fullmatch(piece)
    if matched is None:
        _refuse(text)
    first, last = matched[1], matched[2] or matched[1]
    if not int(first) <= int(last) < int(first) + MOST_NAMES:
        _refuse(text)
    return [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]


def _refuse(text: str) -> NoReturn:
    msg = f"{text!r} is not a list in Slurm's form, such as n[1-3,7] or 4(x2),1"
    raise ConfigError(msg)
