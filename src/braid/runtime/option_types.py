"""Types of command-line options, for tyro and the help."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import tyro

from braid.runtime.option_display import shown_as

__all__ = [
    "Command",
    "DeviceName",
    "Directory",
    "DtypeName",
    "Interval",
    "Module",
    "NumRanks",
    "Number",
    "Ranks",
    "RateRuleName",
    "Target",
    "Text",
    "shown_as",
]  # fmt: skip

SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def _seconds_in(words: list[str]) -> float:
    """Parse a duration such as `30`, `30s`, `1.5m` or `2h`."""
    parts = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([smh]?)", words[0])
    if parts is None:
        msg = f"{words[0]!r} is not a duration: write one such as 30, 30s, 2m or 1h"
        raise ValueError(msg)
    return float(parts[1]) * SECONDS[parts[2]]


Text = Annotated[str, shown_as("TEXT")]
Number = Annotated[int | None, shown_as("INT")]
Directory = Annotated[str | None, shown_as("DIR")]
NumRanks = Annotated[int | None, shown_as("INT", "-n", name="num-ranks")]
Ranks = Annotated[int, tyro.conf.arg(name="num-ranks", aliases=["-n"])]
Interval = Annotated[  # in seconds
    float,
    tyro.conf.arg(name="every"),
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="DURATION",
        instance_from_str=_seconds_in,
        is_instance=lambda value: isinstance(value, int | float),
        str_from_instance=lambda value: [f"{value:g}s"],
    ),
]
Target = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODULE:FUNCTION")]
Module = Annotated[bool, tyro.conf.arg(name="module", aliases=["-m"])]
Command = Annotated[tuple[str, ...], tyro.conf.Positional, shown_as("SCRIPT [ARGS ...]")]
DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["fp32", "bf16"]
RateRuleName = Literal["", "linear", "sqrt", "constant"]
