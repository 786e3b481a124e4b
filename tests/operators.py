"""A counter of the operators of torch that run, for tests of recomputation."""

from __future__ import annotations

from collections import Counter
from typing import Any

from braid.runtime.torch_internals import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Counts the operators that are executed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))
