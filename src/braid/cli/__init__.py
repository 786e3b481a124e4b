"""The command `braid`."""

from braid.cli.command_line import COMMANDS, TYRO_CONFIG, answer, main, separate_command

__all__ = ["COMMANDS", "TYRO_CONFIG", "answer", "main", "separate_command"]
