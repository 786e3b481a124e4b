"""One safetensors file: hashed while it is written, memory-mapped when it is read.

The format is 8 bytes with the length of a JSON header, the header (name -> dtype, shape, byte
range), and the values. The library's writer computes no hash and builds the file in memory first.
This writer streams, so saving needs no second copy of the model. The library reads the files: it
maps them and checks the header.

Source: safetensors format, github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from braid.checkpoint.manifest import FileEntry
from braid.errors import CheckpointError
from braid.runtime.tensor_buffers import bytes_of

__all__ = ["DTYPES", "hash_file", "read_piece", "tensor_file_bytes", "write_tensor_file"]

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
CHUNK_BYTES = 8 << 20


def tensor_file_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the number of bytes of the file for these tensors."""
    return len(_header(tensors)) + sum(t.numel() * t.element_size() for t in tensors.values())


def write_tensor_file(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Write a new file and flush it to disk with fsync; return its length and digest.

    Args:
        path: Path of the file, which must not exist.
        tensors: Tensors by name, in the order of the file.
        metadata: Text entries of the header, if any.

    Raises:
        OSError: The file cannot be written; a part of it may remain.
        CheckpointError: The format does not support a dtype.
    """
    digest = hashlib.sha256()
    nbytes = 0
    with path.open("xb", buffering=0) as file:
        blocks = itertools.chain(
            [memoryview(_header(tensors, metadata))], map(bytes_of, tensors.values())
        )
        for block in blocks:
            for start in range(0, len(block), CHUNK_BYTES):
                rest = block[start : start + CHUNK_BYTES]
                digest.update(rest)
                nbytes += len(rest)
                while rest:
                    rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    return FileEntry(nbytes, digest.hexdigest())


def hash_file(path: Path) -> FileEntry:
    """Return the length and digest of a file.

    Raises:
        OSError: The file cannot be read.
    """
    digest = hashlib.sha256()
    nbytes = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            nbytes += len(chunk)
    return FileEntry(nbytes, digest.hexdigest())


def read_piece(
    path: Path, key: str, shape: tuple[int, ...], dtype: str, box: tuple[slice, ...]
) -> torch.Tensor:
    """Return slices of the tensor `key`, reading only the pages with these slices.

    Args:
        path: Path of the file.
        key: Name of the tensor in the file.
        shape: Expected shape of the stored tensor.
        dtype: Expected dtype, by torch's name.
        box: A slice per dim, relative to the stored tensor.

    Raises:
        CheckpointError: The file has no such tensor.
    """
    try:
        with safe_open(path, framework="pt") as file:
            stored = file.get_slice(key)
            stored_shape = tuple(stored.get_shape())
            if stored_shape != shape:
                msg = (
                    f"{key!r} has shape {list(stored_shape)} in {path.name}, but "
                    f"{list(shape)} in the manifest: the checkpoint is damaged, use another"
                )
                raise CheckpointError(msg)
            tensor: torch.Tensor = stored[box] if box else file.get_tensor(key)
    except (SafetensorError, OSError) as exc:
        msg = f"tensor {key!r} cannot be read from {path}: {exc}"
        raise CheckpointError(msg) from exc
    if str(tensor.dtype) != f"torch.{dtype}":
        msg = (
            f"{key!r} is of {tensor.dtype} in {path.name}, but of {dtype} in the manifest: the "
            "checkpoint is damaged, use another"
        )
        raise CheckpointError(msg)
    return tensor


def _header(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> bytes:
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for key, tensor in tensors.items():
        name = DTYPES.get(tensor.dtype)
        if name is None:
            msg = (
                f"tensor {key!r} has dtype {tensor.dtype}, which safetensors does not support: "
                "convert it first"
            )
            raise CheckpointError(msg)
        end = start + tensor.numel() * tensor.element_size()
        entries[key] = {"dtype": name, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # align the values
    return struct.pack("<Q", len(text)) + text
