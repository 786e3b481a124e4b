"""Types of command-line options, as tyro reads them and the help shows them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import tyro

__all__ = [
    "Command",
    "DeviceName",
    "Directory",
    "DtypeName",
    "Module",
    "NumRanks",
    "Number",
    "Ranks",
    "Target",
    "Text",
    "shown_as",
]  # fmt: skip


def shown_as(metavar: str, *aliases: str, name: str | None = None) -> Any:
    """Return how the help shows an option without `(default: ...)`, where its text has a default.

    Args:
        metavar: Placeholder of the value.
        aliases: Further names of the option.
        name: Name of the option, if it is not that of the parameter.
    """
    return tyro.conf.arg(metavar=metavar, aliases=aliases, name=name, help_behavior_hint="")


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
