"""Locks of parameters: one at a time uses their `.grad`, an optimizer or a local backward."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["PARAM_LOCKS"]


class ParamLocks:
    """A lock for each parameter, which lives as long as the parameter."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks = WeakTensorKeyDictionary()

    @contextlib.contextmanager
    def held(self, params: Sequence[torch.Tensor]) -> Iterator[None]:
        """Hold the locks of some parameters, in one order for all who do."""
        with self._guard:
            for p in params:
                if p not in self._locks:
                    self._locks[p] = threading.Lock()
            locks = {id(p): self._locks[p] for p in params}
        with contextlib.ExitStack() as stack:
            for key in sorted(locks):
                stack.enter_context(locks[key])
            yield


PARAM_LOCKS = ParamLocks()
