"""Program of the ranks that `braid.launch.spawn` starts.

python -m braid.launch.process.spawned module:function '[arguments]' [FILE]
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["main"]


def main(target: str, arguments: str, file: str = "") -> None:
    """Import the function that `target` names and call it.

    Args:
        target: `module:function`, or `module:Class.method`.
        arguments: Positional arguments of the function, as a JSON list. Where the function takes a
            dataclass or a `msgspec.Struct`, it gets one.
        file: File for the value that the function returns on one rank, as JSON; None is not
            written. Without a file, items of an iterator are printed, one JSON line each, and other
            values are dropped.
    """
    module, _, name = target.partition(":")
    function = attrgetter(name)(import_module(module))
    values = json.loads(arguments)
    if any(isinstance(value, dict) for value in values):
        kinds = inspect.signature(function, eval_str=True).parameters.values()
        values = [_as(kind.annotation, value) for kind, value in zip(kinds, values, strict=False)]
    value = function(*values)
    if file and value is not None:
        Path(file).write_bytes(msgspec.json.encode(value))
    elif isinstance(value, Iterator):
        for item in value:
            sys.stdout.write(f"{msgspec.json.encode(item).decode()}\n")
            sys.stdout.flush()


def _as(kind: Any, value: Any) -> Any:
    has_fields = isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, msgspec.Struct))
    return msgspec.convert(value, kind) if has_fields else value


if __name__ == "__main__":
    main(*sys.argv[1:])
