"""The command `braid`."""

from braid.cli.command_line import COMMANDS, main, separate_command

__all__ = ["COMMANDS", "main", "separate_command"]
