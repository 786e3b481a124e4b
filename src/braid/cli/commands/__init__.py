"""Families of subcommands of `braid`; see ../README.md."""

from __future__ import annotations

from typing import Annotated

import tyro

__all__ = ["NO_DEFAULT", "Directory", "NumRanks", "Threads"]

NO_DEFAULT = ""  # instead of tyro's `(default: None)`, where the help says what happens by default
Directory = Annotated[str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint=NO_DEFAULT)]
Threads = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint=NO_DEFAULT)]
NumRanks = Annotated[
    int | None,
    tyro.conf.arg(name="num-ranks", aliases=["-n"], metavar="INT", help_behavior_hint=NO_DEFAULT),
]
