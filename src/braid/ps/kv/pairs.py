"""Pairs of keys and values, as pushed by workers and returned to pulls.

    keys    [n]    torch.uint64, sorted and unique
    vals    [m]    any dtype, the concatenated values of all keys
    lens    [n]    int64, the number of values of each key; None for m / n values each

Keys are sent without conversion or copy. To compute with keys, use `ids`: int64 in the same order,
since torch has few operations for uint64.

Source: PS-Lite's KVPairs. Its errors end the process; these errors name the first mistake.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import torch

from braid.errors import ConfigError, raise_all
from braid.ps.storage.keys import to_signed
from braid.types import dtype_name

__all__ = ["KVPairs", "Keys", "Lens", "as_keys", "as_lens", "as_vals", "check_pairs", "offsets"]

Keys: TypeAlias = "torch.Tensor | np.ndarray | Sequence[int]"
Lens: TypeAlias = "torch.Tensor | np.ndarray | Sequence[int] | None"
Vals: TypeAlias = "torch.Tensor | np.ndarray | Sequence[float]"
LENGTHS = {torch.int32, torch.int64}


class KVPairs:
    """Sorted keys with their values, as pushes, pulls and answers carry them.

    Args:
        keys: Keys, sorted and unique: torch.uint64, nonnegative torch.int64, numpy arrays of these,
            or numbers.
        vals: Values; an empty tensor when None.
        lens: Number of values of each key; all keys have the same number when None.

    Attributes:
        keys: Keys as torch.uint64.
        vals: Values, one-dimensional.
        lens: Number of values of each key in int64, or None.
    """

    __slots__ = ("_ids", "keys", "lens", "vals")

    def __init__(self, keys: Keys = (), vals: Vals | None = None, lens: Lens = None) -> None:
        self.keys = as_keys(keys)
        self.vals = torch.empty(0) if vals is None else as_vals(vals)
        self.lens = as_lens(lens)
        self._ids: torch.Tensor | None = None

    @property
    def ids(self) -> torch.Tensor:
        """Keys as int64 ids in the same order: the top bit of each key is flipped."""
        if self._ids is None:
            self._ids = to_signed(self.keys)
        return self._ids

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        lens = "equal" if self.lens is None else "own"
        dtype = dtype_name(self.vals.dtype)
        return f"<KVPairs: {len(self)} keys, {self.vals.numel()} {dtype} of {lens} lengths>"


def as_keys(keys: Keys) -> torch.Tensor:
    """Return keys as torch.uint64; only Python numbers are copied.

    Raises:
        ConfigError: Dtype, shape or a value is not valid for keys.
    """
    if not isinstance(keys, torch.Tensor):
        array = keys if isinstance(keys, np.ndarray) else _array(keys)
        keys = torch.from_numpy(np.ascontiguousarray(array))
    if keys.dtype not in {torch.uint64, torch.int64} or keys.dim() != 1:
        dtype = dtype_name(keys.dtype)
        msg = (
            f"keys must be a one-dimensional uint64 or int64 tensor, got {dtype}{list(keys.shape)}"
        )
        raise ConfigError(msg)
    keys = keys.detach().cpu().contiguous()
    if keys.dtype == torch.int64:
        if len(keys) and int(keys.min()) < 0:
            place = int(keys.argmin())
            msg = f"keys must be from 0 to 2^64 - 1, got {int(keys[place])} at index {place}"
            raise ConfigError(msg)
        keys = keys.view(torch.uint64)
    return keys


def _array(keys: Iterable[int]) -> np.ndarray:
    numbers = list(keys)
    try:
        return np.array([operator.index(number) for number in numbers], dtype=np.uint64)
    except (TypeError, OverflowError) as exc:
        msg = f"keys must be whole numbers from 0 to 2^64 - 1, got {reprlib.repr(numbers)}: {exc}"
        raise ConfigError(msg) from exc


def as_vals(vals: Vals) -> torch.Tensor:
    """Return values as a contiguous one-dimensional tensor on the CPU.

    Raises:
        ConfigError: The values are not one-dimensional.
    """
    if not isinstance(vals, torch.Tensor):
        vals = torch.as_tensor(vals)
    if vals.dim() != 1:
        msg = f"vals must have one dim, got shape {list(vals.shape)}: pass vals.reshape(-1)"
        raise ConfigError(msg)
    return vals.detach().cpu().contiguous()


def as_lens(lens: Lens) -> torch.Tensor | None:
    """Return lengths as int64; None if there are none, which means equal lengths for all keys.

    Raises:
        ConfigError: The lengths are not one-dimensional integers.
    """
    if lens is None or not len(lens):
        return None
    tensor = lens if isinstance(lens, torch.Tensor) else torch.as_tensor(lens)
    if tensor.dtype not in LENGTHS or tensor.dim() != 1:
        dtype = dtype_name(tensor.dtype)
        msg = (
            f"lens must be a one-dimensional int32 or int64 tensor, got {dtype}{list(tensor.shape)}"
        )
        raise ConfigError(msg)
    return tensor.detach().cpu().long().contiguous()


def check_pairs(keys: torch.Tensor, num_vals: int | None, lens: torch.Tensor | None) -> None:
    """Check that keys ascend and lengths add up.

    Args:
        keys: Keys, uint64.
        num_vals: Number of values; None to skip the comparison.
        lens: Number of values of each key.

    Raises:
        ConfigError: Keys do not ascend, or lengths do not fit; all problems are named.
    """
    problems = []
    array = keys.numpy()
    ascends = array[1:] > array[:-1]
    if not ascends.all():
        place = int(ascends.argmin())
        first, second = int(array[place]), int(array[place + 1])
        fault = "twice" if first == second else "not sorted"
        problems.append(f"keys are {fault}: {first}, {second} at index {place}")
    if lens is not None:
        if len(lens) != len(keys):
            problems.append(
                f"lens has {len(lens)} elements for {len(keys)} keys: pass one for each key"
            )
        elif int(lens.min()) < 0:
            place = int(lens.argmin())
            problems.append(f"lens must not be negative, got {int(lens[place])} at index {place}")
        elif num_vals is not None and int(lens.sum()) != num_vals:
            problems.append(
                f"lens add up to {int(lens.sum())}, but vals has {num_vals} elements: make the "
                "two equal"
            )
    elif num_vals is not None and (num_vals % len(keys) if len(keys) else num_vals):
        problems.append(
            f"{num_vals} elements of vals are not a multiple of {len(keys)} keys: pass lens, the "
            "number of elements per key"
        )
    raise_all(problems)


def offsets(lens: torch.Tensor) -> torch.Tensor:
    """Return the index of each key's first value, then the number of values; shape [n + 1]."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)])
