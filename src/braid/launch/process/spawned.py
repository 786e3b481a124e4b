"""Program of the ranks that `braid.launch.spawn` starts.

python -m braid.launch.process.spawned module:function '[arguments]'
"""

from __future__ import annotations

import inspect
import json
import sys
from importlib import import_module
from operator import attrgetter
from typing import Any

import msgspec

__all__ = ["main"]


def main(target: str, arguments: str) -> None:
    """Import the function that `target` names and call it.

    Args:
        target: `module:function`, or `module:Class.method`.
        arguments: Positional arguments of the function, as a JSON list. Where the function takes a
            `msgspec.Struct`, it gets one.
    """
    module, _, name = target.partition(":")
    function = attrgetter(name)(import_module(module))
    values = json.loads(arguments)
    if any(isinstance(value, dict) for value in values):
        kinds = inspect.signature(function, eval_str=True).parameters.values()
        values = [_as(kind.annotation, value) for kind, value in zip(kinds, values, strict=False)]
    function(*values)


def _as(kind: Any, value: Any) -> Any:
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return msgspec.convert(value, kind) if is_struct else value


if __name__ == "__main__":
    main(*sys.argv[1:])
