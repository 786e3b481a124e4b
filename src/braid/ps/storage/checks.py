"""Checks of tensors against a table, with messages that name the table and every difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from braid.errors import ConfigError
from braid.types import dtype_name

__all__ = ["Expected", "check_floating", "check_names", "check_tensors", "described"]


class Expected(NamedTuple):
    """Expected dtype and shape of a tensor.

    Attributes:
        name: Name of the tensor in messages.
        dtype: Expected dtype; any when None.
        shape: Expected shape; None stands for any length.
    """

    name: str
    dtype: torch.dtype | None
    shape: tuple[int | None, ...]

    def differs(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has another dtype, shape or layout."""
        fits = tensor.shape == self.shape or (
            tensor.dim() == len(self.shape)
            and all(n in {None, actual} for n, actual in zip(self.shape, tensor.shape, strict=True))
        )
        same = self.dtype in {None, tensor.dtype} and tensor.layout == torch.strided
        return not (fits and same)

    def __str__(self) -> str:
        dtype = "any dtype" if self.dtype is None else dtype_name(self.dtype)
        shape = ", ".join("n" if length is None else str(length) for length in self.shape)
        return f"{dtype}[{shape}]"


def described(tensor: torch.Tensor) -> str:
    """Return the dtype and shape of a tensor as text."""
    layout = "" if tensor.layout == torch.strided else f" ({tensor.layout})"
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}{layout}"


def check_tensors(
    table: str,
    kind: str,
    tensors: Sequence[torch.Tensor],
    expected: Sequence[Expected],
    advice: str,
) -> None:
    """Check number, dtypes and shapes of tensors.

    Args:
        table: Name of the table.
        kind: Noun for the tensors as a whole, such as "a push".
        tensors: Tensors to check.
        expected: Expected dtype and shape of each tensor.
        advice: Advice at the end of the message.

    Raises:
        ConfigError: Something differs; all differences are named.
    """
    if len(tensors) != len(expected):
        wanted = ", ".join(f"{one.name} {one}" for one in expected)
        actual = ", ".join(map(described, tensors)) or "none"
        msg = (
            f"table {table!r}: {kind} has {len(expected)} tensors ({wanted}), "
            f"got {len(tensors)} ({actual}). {advice}"
        )
        raise ConfigError(msg)
    problems = [
        f"expected {one.name} {one}, got {described(tensor)}"
        for one, tensor in zip(expected, tensors, strict=True)
        if one.differs(tensor)
    ]
    if problems:
        msg = f"table {table!r}: {kind} does not match the table: {'; '.join(problems)}. {advice}"
        raise ConfigError(msg)


def check_floating(table: str, dtype: torch.dtype) -> None:
    """Check that a table's dtype is a floating-point dtype.

    Raises:
        ConfigError: The dtype is not floating-point.
    """
    if not dtype.is_floating_point:
        msg = f"table {table!r}: values must have a floating dtype, got {dtype_name(dtype)}"
        raise ConfigError(msg)


def check_names(table: str, state: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
    """Check that a state has the expected names.

    Raises:
        ConfigError: Names are missing or unknown.
    """
    missing, unknown = sorted(set(names) - set(state)), sorted(set(state) - set(names))
    problems = [
        f"{word} {', '.join(some)}"
        for word, some in (("lacks", missing), ("has the unknown", unknown))
        if some
    ]
    if problems:
        msg = (
            f"table {table!r}: the state {' and '.join(problems)}. Load the export of a table with "
            "the same kind of optimizer"
        )
        raise ConfigError(msg)
