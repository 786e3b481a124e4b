"""Converts numpy arrays to tensors of bytes that can be sent, and back.

Problem: a pickled array runs code of the sender. torch lacks some of numpy's dtypes, such as
`longdouble` and the dtypes with the other byte order.

Idea: an array is its bytes, its dtype as text, and its shape. Only numbers are sent; a dtype is
looked up in a table, so that no text of a peer is parsed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from braid.errors import CommError
from braid.rpc.outcomes import RpcError

__all__ = ["array_of", "bytes_of_array", "bytes_of_scalar", "is_number", "scalar_of"]

_CODES = "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
_NATIVE: list[np.dtype[Any]] = [np.dtype(code) for code in _CODES]
_DTYPES = {dtype.str: dtype for kind in _NATIVE for dtype in (kind, kind.newbyteorder())}


def bytes_of_array(array: np.ndarray[Any, Any], noun: str) -> tuple[torch.Tensor, str, list[int]]:
    """Return the bytes of an array in C order, its dtype as text, and its shape.

    A contiguous array that can be written to is not copied.

    Args:
        array: The array.
        noun: Noun for the array, for errors.

    Raises:
        RpcError: The array has a dtype that is not a number, such as `object`.
    """
    dtype = _text_of(array.dtype, noun)
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = np.array(array, order="C")
    return torch.from_numpy(array.reshape(-1).view(np.uint8)), dtype, list(array.shape)


def array_of(content: torch.Tensor, dtype: str, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the array that `bytes_of_array` converted, as a view of the tensor.

    Raises:
        CommError: The bytes do not have the size of the array, or the dtype is unknown.
    """
    size = math.prod(shape) * _dtype_of(dtype).itemsize
    if content.dtype != torch.uint8 or content.dim() != 1 or content.numel() != size:
        msg = (
            f"an array of {dtype} and shape {tuple(shape)} has {size} bytes, but "
            f"{content.numel()} of {content.dtype} were sent"
        )
        raise CommError(msg)
    return content.numpy().view(_DTYPES[dtype]).reshape(tuple(shape))


def bytes_of_scalar(scalar: np.generic, noun: str) -> tuple[str, bytes]:
    """Return the dtype of a numpy scalar as text, and its bytes.

    Raises:
        RpcError: The scalar is not a number.
    """
    return _text_of(scalar.dtype, noun), scalar.tobytes()


def scalar_of(dtype: str, content: bytes) -> np.generic:
    """Return the scalar that `bytes_of_scalar` converted.

    Raises:
        CommError: The dtype is unknown.
    """
    (scalar,) = np.frombuffer(content, _dtype_of(dtype))
    assert isinstance(scalar, np.generic)
    return scalar


def is_number(dtype: np.dtype[Any]) -> bool:
    """Return whether values of a dtype are numbers, which can be sent."""
    return dtype.str in _DTYPES and not dtype.metadata


def _text_of(dtype: np.dtype[Any], noun: str) -> str:
    if not is_number(dtype):
        msg = (
            f"{noun} has the numpy dtype {dtype}, which cannot be sent: send numbers, or a list "
            "(array.tolist())"
        )
        raise RpcError(msg)
    return str(dtype.str)


def _dtype_of(text: str) -> np.dtype[Any]:
    if text not in _DTYPES:
        msg = f"another node sent an array of the unknown dtype {text!r}: send numbers"
        raise CommError(msg)
    return _DTYPES[text]
