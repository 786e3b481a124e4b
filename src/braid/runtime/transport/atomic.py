"""Atomic fetch-and-add on a word that several processes share.

Problem: ranks that take pieces of work from a common queue need one counter that all of them
change. With loads and stores alone, in any order, one rank must wait for another. The processor has
an instruction for it, but Python has no access to the instruction, and installing braid should not
need a compiler.

Idea: the C++ runtime, which torch loads into every process, exports its function for counting
references: `int __gnu_cxx::__exchange_and_add(volatile int*, int)`, part of its binary interface
since 2004. A call costs 0.25 us.

Source: Herlihy, "Wait-Free Synchronization" (1991): why loads and stores are not enough.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

__all__ = ["MASK", "fetch_add", "is_atomic_between_processes"]

MASK = 0xFFFFFFFF  # counters have 32 bits and wrap around
RUNTIME, SYMBOL = "libstdc++.so.6", "_ZN9__gnu_cxx18__exchange_and_addEPVii"


def _of_runtime() -> Callable[[int, int], int] | None:
    try:
        # PyDLL: the call is shorter than releasing and taking the interpreter's lock
        function = ctypes.PyDLL(RUNTIME)[SYMBOL]
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_int)
    function.restype = ctypes.c_uint
    return function


_FETCH_ADD = _of_runtime()
_LOCK = threading.Lock()


def is_atomic_between_processes() -> bool:
    """Return whether `fetch_add` may be used on memory that another process changes, too."""
    return _FETCH_ADD is not None


def fetch_add(address: int, amount: int) -> int:
    """Add to the 32-bit word at `address`, and return its previous value.

    Args:
        address: Address of the word, a multiple of 4.
        amount: Number to add.

    Returns:
        A number from 0 to `MASK`.

    >>> word = ctypes.c_uint32(MASK)
    >>> fetch_add(ctypes.addressof(word), 3) == MASK, word.value
    (True, 2)
    """
    if _FETCH_ADD is not None:
        return _FETCH_ADD(address, amount)
    with _LOCK:  # for the threads of this process
        word = ctypes.c_uint32.from_address(address)
        before = word.value
        word.value = before + amount & MASK
        return before
