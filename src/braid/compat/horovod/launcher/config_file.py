"""Sections of horovodrun's configuration file; options of the command line take precedence.

params:
  fusion-threshold-mb: 32
timeline:
  filename: /tmp/timeline.json
verbose: true
"""

from __future__ import annotations

from collections.abc import Mapping

from braid.compat.horovod.launcher.flags import Flags
from braid.compat.horovod.launcher.options import BY_NAME, Option
from braid.compat.horovod.variables import closest
from braid.errors import ConfigError

__all__ = ["with_config"]

PATHS: Mapping[tuple[str, str], Option] = {
    option.path: option
    for option in BY_NAME.values()
    if option.use != "ask" and option.name != "config-file"
}
SECTIONS = sorted({section for section, _ in PATHS if section})


def with_config(flags: Flags, content: object, name: str) -> Flags:
    """Return the options of the command line, completed by options from a configuration file.

    Args:
        flags: Options of the command line.
        content: Parsed content of the file.
        name: Name of the file in errors.

    Raises:
        ConfigError: Sections or keys are unknown, or values have a wrong type; the message names
            all of them.
    """
    if not isinstance(content, Mapping | None):
        msg = f"{name} must have sections such as `params:`, got {type(content).__name__}"
        raise ConfigError(msg)
    problems: list[str] = []
    values: dict[str, str] = {}
    for path, value in _rows(content or {}).items():
        option = PATHS.get(path)
        if option is None:
            problems.append(_unknown(path, value))
        elif value is not None:
            values[option.name] = _text(option, value, ".".join(filter(None, path)), problems)
    if problems:
        msg = f"{name} cannot be used: {'; '.join(problems)}"
        raise ConfigError(msg)
    return Flags(values={**values, **flags.values}, command=flags.command)


def _rows(content: Mapping[object, object]) -> dict[tuple[str, str], object]:
    """Return values by section and key."""
    rows: dict[tuple[str, str], object] = {}
    for name, value in content.items():
        section = _plain(name)
        if section in SECTIONS and isinstance(value, Mapping):
            rows |= {(section, _plain(key)): inner for key, inner in value.items()}
        elif section not in SECTIONS or value is not None:  # a section may be empty
            rows["", section] = value
    return rows


def _plain(key: object) -> str:
    return str(key).replace("_", "-")


def _text(option: Option, value: object, path: str, problems: list[str]) -> str:
    if not option.metavar:
        if not isinstance(value, bool):
            problems.append(f"{path} must be true or false, got {value!r}")
        return str(int(value is True))
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        problems.append(f"{path} must be one value, got {value!r}")
    return str(value)


def _unknown(path: tuple[str, str], value: object) -> str:
    section, key = path
    keys = [k for s, k in PATHS if s == section]
    if not section and key in SECTIONS:
        inner = next(k for s, k in PATHS if s == key)
        return f"{key} must contain keys, such as {inner}, got {value!r}"
    if not section:
        keys += SECTIONS
    return f"{'.'.join(filter(None, path))} is not known{closest(key, keys)}"
