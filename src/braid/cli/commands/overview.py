"""The list of commands, in groups, as `braid --help` and `braid bench --help` print it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping

__all__ = ["FAMILIES", "GROUPS", "family_text", "overview"]

WIDTH = 80
# title -> first words of its commands
GROUPS: Mapping[str, tuple[str, ...]] = {
    "train": ("run", "train", "demo", "slurm", "k8s"),
    "understand": ("status", "report", "chaos", "doctor", "prove", "checkpoint"),
    "plan": ("profile", "plan", "probe", "schedule", "convert"),
    "measure": ("bench",),
}
FAMILIES: Mapping[str, str] = {
    "bench": "Measure braid against other libraries, in turns in one run.",
    "checkpoint": "List, verify, export and reshard checkpoints.",
    "k8s": "Files for Kubernetes.",
    "plan": "Choose how to split a model over machines.",
    "schedule": "Show, check, simulate and compare collectives and pipelines as programs.",
    "slurm": "Files for Slurm.",
}

Commands = Mapping[str, Callable[..., int] | tuple[str, ...]]


def overview(commands: Commands, version: str) -> str:
    """Return the help of `braid`: one line per command, in groups."""
    lines = [
        "usage: braid COMMAND [OPTIONS ...]",
        "",
        f"Train PyTorch models in parallel, on one communication core (braid {version}).",
    ]
    column = 2 + max(map(len, commands)) + 2
    for title, words in GROUPS.items():
        lines += ["", title]
        for word in words:
            names = [name for name in commands if name.split(" ")[0] == word]
            lines += [line for name in names for line in _entry(name, commands[name], column)]
    lines += [
        "",
        "options",
        *_lines("-h, --help", "this list; braid COMMAND --help has more", column),
        *_lines("-V, --version", "the version of braid", column),
    ]
    return "\n".join(lines)


def family_text(family: str, commands: Commands) -> str:
    """Return the help of the commands that begin with `family`; empty if there are none."""
    inside = {name: call for name, call in commands.items() if name.startswith(f"{family} ")}
    if not inside:
        return ""
    last = ",".join(name.split(" ")[1] for name in inside)
    column = 2 + max(map(len, inside)) + 2
    lines = [f"usage: braid {family} {{{last}}} [OPTIONS ...]", "", FAMILIES.get(family, ""), ""]
    lines += [line for name, call in inside.items() for line in _entry(name, call, column)]
    lines += ["", f"braid {family} COMMAND --help has the options of a command."]
    return "\n".join(lines)


def _entry(name: str, call: Callable[..., int] | tuple[str, ...], column: int) -> list[str]:
    summary = getattr(call, "summary", None) or (call.__doc__ or "").split("\n\n")[0]
    return _lines(name, " ".join(summary.split()), column)


def _lines(name: str, text: str, column: int) -> list[str]:
    first, *rest = textwrap.wrap(text, WIDTH - column) or [""]
    return [f"  {name}".ljust(column) + first, *(" " * column + line for line in rest)]
