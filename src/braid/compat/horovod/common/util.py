"""Functions of `horovod.common.util`: checks of the build, and small tools."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from braid.compat.horovod import basics

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
]

_cache = functools.cache  # a decorator that programs import


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a library such as "torch" is supported; `verbose` has no effect."""
    del verbose
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a library is supported on the GPUs of this host."""
    return extension_available(ext_base_name, verbose) and torch.cuda.is_available()


def _with_verbose(built: Callable[[], object]) -> Callable[..., bool]:
    """Return a check of the build that accepts `verbose`, which has no effect."""

    @functools.wraps(built)
    def check(verbose: bool = False) -> bool:
        del verbose
        return bool(built())

    return check


mpi_built = _with_verbose(basics.mpi_built)
gloo_built = _with_verbose(basics.gloo_built)
nccl_built = _with_verbose(basics.nccl_built)
ddl_built = _with_verbose(basics.ddl_built)
ccl_built = _with_verbose(basics.ccl_built)
cuda_built = _with_verbose(basics.cuda_built)
rocm_built = _with_verbose(basics.rocm_built)


@contextlib.contextmanager
def env(**kwargs: str) -> Iterator[None]:
    """Set environment variables inside the context, and restore them afterwards."""
    before = {name: os.environ.get(name) for name in kwargs}
    os.environ.update(kwargs)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[Any], n: int) -> list[list[Any]]:  # noqa: E741 - Horovod's name
    """Divide a list into at most `n` non-empty lists of nearly equal length."""
    size, more = divmod(len(l), n)
    ends = [number * size + min(number, more) for number in range(n + 1)]
    return [list(l[a:b]) for a, b in itertools.pairwise(ends) if b > a]


def is_iterable(x: Any) -> bool:
    """Return whether a value can be iterated over."""
    return isinstance(x, Iterable)
