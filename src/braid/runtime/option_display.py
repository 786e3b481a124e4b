"""Display of options in the help.

Annotations stay text until tyro reads them. So a dataclass of options can be used without a command
line and without importing tyro, which would slow each launch.
"""

from __future__ import annotations

from typing import Any

__all__ = ["shown_as"]


def shown_as(metavar: str | None, *aliases: str, name: str | None = None) -> Any:
    """Return settings for tyro, the command-line parser, on how to show an option in the help.

    With a metavar, the help omits `(default: ...)`.

    Args:
        metavar: Placeholder of the value; None for tyro's placeholder with `(default: ...)`.
        aliases: Further names of the option.
        name: Name of the option, if it is not the parameter's name.
    """
    import tyro  # noqa: PLC0415 - only for command lines

    hint = None if metavar is None else ""
    return tyro.conf.arg(metavar=metavar, aliases=aliases, name=name, help_behavior_hint=hint)
