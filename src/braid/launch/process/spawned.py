"""Program of the ranks that `braid.launch.spawn` starts.

python -m braid.launch.process.spawned module:function '[arguments]'
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from operator import attrgetter

__all__ = ["main"]


def main(target: str, arguments: str) -> None:
    """Import the function that `target` names and call it.

    Args:
        target: `module:function`, or `module:Class.method`.
        arguments: Positional arguments of the function, as a JSON list.
    """
    module, _, name = target.partition(":")
    attrgetter(name)(import_module(module))(*json.loads(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
