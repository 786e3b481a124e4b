"""Types of command-line options, for tyro and the help."""

from __future__ import annotations

from typing import Annotated, Literal

import tyro

from braid.runtime.option_display import shown_as

__all__ = [
    "Command",
    "DeviceName",
    "Directory",
    "DtypeName",
    "Module",
    "NumRanks",
    "Number",
    "Ranks",
    "RateRuleName",
    "Target",
    "Text",
    "shown_as",
]  # fmt: skip

Text = Annotated[str, shown_as("TEXT")]
Number = Annotated[int | None, shown_as("INT")]
Directory = Annotated[str | None, shown_as("DIR")]
NumRanks = Annotated[int | None, shown_as("INT", "-n", name="num-ranks")]
Ranks = Annotated[int, tyro.conf.arg(name="num-ranks", aliases=["-n"])]
Target = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODULE:FUNCTION")]
Module = Annotated[bool, tyro.conf.arg(name="module", aliases=["-m"])]
Command = Annotated[tuple[str, ...], tyro.conf.Positional, shown_as("SCRIPT [ARGS ...]")]
DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["fp32", "bf16"]
RateRuleName = Literal["", "linear", "sqrt", "constant"]
