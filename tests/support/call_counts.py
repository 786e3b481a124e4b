"""Count the Python calls into braid that a piece of code makes, and the files in which they lie.

The way of an operation through the source is what a reader has to follow and what a small
collective costs. Tests limit the counts of common operations, so that they stay low.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import braid

__all__ = ["CallCounts", "count_calls"]

_PACKAGE = str(Path(braid.__file__).parent) + "/"


class CallCounts(NamedTuple):
    """Counts of the calls into braid's functions.

    Attributes:
        calls: Number of calls; each resumption of a generator counts.
        files: Number of files that hold the called functions.
        by_function: Number of calls of each function, as "file:function".
    """

    calls: int
    files: int
    by_function: dict[str, int]


def count_calls(run: Callable[[], object]) -> CallCounts:
    """Run `run` in this thread and count the calls into braid that it makes.

    Args:
        run: The code; calls of other threads are not counted.
    """
    seen: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        path = code.co_filename
        if event == "call" and path.startswith(_PACKAGE):
            name = getattr(code, "co_qualname", code.co_name)  # since Python 3.11
            seen[path.removeprefix(_PACKAGE), name] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    by_function = {f"{path}:{name}": number for (path, name), number in seen.most_common()}
    return CallCounts(seen.total(), len({path for path, _ in seen}), by_function)
