"""Parser of horovodrun's command line into options and a command. Pure.

The first word that is not an option, and all words after it, belong to the command.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from braid.compat.horovod.launcher.options import BY_NAME, GROUPS, Option
from braid.compat.horovod.variables import closest
from braid.errors import ConfigError

__all__ = ["Flags", "help_text", "parse_flags"]

USAGE = "horovodrun [options] command [arguments]"
DESCRIPTION = (
    "Start a program on several ranks, on this host or on others, with horovodrun's options and "
    "braid's launcher: "
    "`horovodrun -np 4 -H a:2,b:2 python train.py --lr 0.1`."
)
EPILOG = "HOROVOD_* variables of this environment are used for options that are not given."


@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """Options and command, as typed and not yet checked.

    Attributes:
        values: Values by name of the option; `1` and `0` for switches.
        command: Command that ranks run.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> str:
        """Return the value of an option; empty if it is missing."""
        assert name in BY_NAME, name
        return self.values.get(name, "")

    def is_on(self, name: str) -> bool:
        """Return whether the switch with this name is present and not negated."""
        return self[name] == "1"


def parse_flags(arguments: Sequence[str]) -> Flags:
    """Parse a command line.

    Args:
        arguments: Arguments of `horovodrun`.

    Raises:
        ConfigError: Options are unknown (the message names the closest ones), or a value is
            missing.
    """
    parsed, strange = _parser().parse_known_args(list(arguments))
    values: dict[str, str] = {}
    for name, value in vars(parsed).items():
        if name != "command" and value is not None:
            values[name] = " ".join(value) if isinstance(value, list) else value
    unknown = [word.partition("=")[0] for word in strange if word.startswith("-")]
    if unknown:
        known = [flag for option in BY_NAME.values() for flag in _forms(option)]
        listed = "; ".join(f"{flag}{closest(flag, known)}" for flag in unknown)
        msg = f"horovodrun does not know {listed} (see --help)"
        raise ConfigError(msg)
    command = parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command
    return Flags(values=values, command=tuple(command))


def help_text() -> str:
    """Return the text of `--help`."""
    return _parser().format_help()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        msg = f"{message} (see --help)"
        raise ConfigError(msg)


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=100)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="horovodrun",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=_Formatter,
        add_help=False,
        allow_abbrev=False,
    )
    for title, options in GROUPS.items():
        group = parser.add_argument_group(title)
        for option in options:
            _add(group, option)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    text = option.help.replace("%", "%%")
    if option.metavar:
        count = option.num_values if option.num_values > 1 else None
        group.add_argument(
            *option.flags, dest=option.name, help=text, metavar=option.metavar, nargs=count
        )
        return
    group.add_argument(*option.flags, dest=option.name, help=text, action="store_const", const="1")
    if option.negated:
        group.add_argument(
            *_negations(option),
            dest=option.name,
            help=f"not --{option.name}",
            action="store_const",
            const="0",
        )


def _negations(option: Option) -> list[str]:
    return [f"--no-{flag[2:]}" for flag in option.flags if flag.startswith("--")]


def _forms(option: Option) -> list[str]:
    return [*option.flags, *(_negations(option) if option.negated else ())]
