"""Command line of braid: `python -m braid` is the same as the command `braid`."""

from __future__ import annotations

import sys

from braid.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
