"""Display of options in the help.

Annotations stay text until tyro reads them, so a dataclass of options that is also used without a
command line does not import tyro, which would slow each launch.
"""

from __future__ import annotations

from typing import Any

__all__ = ["shown_as"]


def shown_as(metavar: str | None, *aliases: str, name: str | None = None) -> Any:
    """Return how the help shows an option without `(default: ...)`, where its text has a default.

    Args:
        metavar: Placeholder of the value; None for the default one, with `(default: ...)`.
        aliases: Further names of the option.
        name: Name of the option, if it is not that of the parameter.
    """
    import tyro  # noqa: PLC0415 - only where a command line is read

    hint = None if metavar is None else ""
    return tyro.conf.arg(metavar=metavar, aliases=aliases, name=name, help_behavior_hint=hint)
