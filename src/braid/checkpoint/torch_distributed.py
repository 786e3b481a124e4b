"""Reads torch's distributed checkpoint (DCP) without executing code from its files.

Problem: its metadata, the file `.metadata`, is a pickle, and torch reads it with an unpickler that
executes code. torch also unpickles the values that are not tensors.

Idea: an unpickler with an allow list of the metadata's classes. It creates plain stand-in classes
for each file instead of torch's classes, so that a file cannot change torch's classes. Tensors are
read with `torch.load(weights_only=True)` from a byte range of a file in the same directory. Other
values are not read.

Source: torch.distributed.checkpoint.metadata and .filesystem (torch 2.10 to 2.14).
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from braid.errors import CheckpointError

__all__ = ["METADATA_NAME", "regular_file", "stored_tensors"]

METADATA_NAME = ".metadata"
# Python 3.11.0 to 3.11.3 pickles a member of this enum by name, later ones by value
_ENUM = "_MEM_FORMAT_ENCODING"
_MEMBERS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
        "StorageMeta", "TensorProperties", "TensorStorageMetadata", _ENUM,
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "WindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "WindowsPath"},  # the module's name in Python 3.13
}  # fmt: skip
_VALUES: dict[str, Any] = {"collections.OrderedDict": dict, "builtins.set": set}


class StoredTensor(NamedTuple):
    """A tensor of a distributed checkpoint.

    Attributes:
        path: Keys of the nested dicts in which the tensor was saved.
        read: Function that reads the tensor; None for a value that is not a tensor.
    """

    path: tuple[str, ...]
    read: Callable[[], torch.Tensor] | None


def regular_file(directory: Path, name: object) -> Path:
    """Return the path of a file named in the metadata, if it is a regular file in `directory`.

    Raises:
        CheckpointError: The file is outside of `directory`, or is not a regular file.
    """
    if not isinstance(name, str) or Path(name).name != name or "\0" in name or name == "..":
        msg = (
            f"the metadata in {directory} names the file {str(name)[:80]!r}, which is outside of "
            "this directory: use a checkpoint with all files in one directory"
        )
        raise CheckpointError(msg)
    path = directory / name
    if path.exists() and not path.is_file():
        msg = f"{path} is not a regular file"
        raise CheckpointError(msg)
    return path


def stored_tensors(directory: Path) -> Iterator[StoredTensor]:
    """Yield the entries of a distributed checkpoint.

    Raises:
        Exception: The metadata is invalid; the caller adds the checkpoint's path.
    """
    metadata = _read_metadata(regular_file(directory, METADATA_NAME))
    places = {(index.fqn, _sizes(index)): info for index, info in metadata.storage_data.items()}
    paths = vars(metadata).get("planner_data") or {}
    for name, entry in metadata.state_dict_metadata.items():
        path = tuple(map(str, paths.get(name, (name,))))
        if type(entry).__name__ == "TensorStorageMetadata":
            tensor = _Stored(directory, name, entry, places)
            yield StoredTensor(path, tensor.read)
        else:
            yield StoredTensor(path, None)


class _Stored(NamedTuple):
    """A tensor's metadata: its pieces, and their positions in files."""

    directory: Path
    name: str
    entry: Any
    places: Mapping[tuple[str, tuple[int, ...] | None], Any]

    def read(self) -> torch.Tensor:
        """Read all pieces and return the whole tensor."""
        shape, dtype = tuple(self.entry.size), self.entry.properties.state[0]
        chunks = [(tuple(c.offsets), tuple(c.sizes)) for c in self.entry.chunks]
        infos = [self.places[self.name, offsets] for offsets, _ in chunks]
        if sum(math.prod(sizes) for _, sizes in chunks) != math.prod(shape):
            msg = (
                f"the stored pieces of the tensor {self.name} do not add up to its shape "
                f"{list(shape)}: the checkpoint is damaged"
            )
            raise CheckpointError(msg)
        pieces = [self._piece(i, sizes, dtype) for i, (_, sizes) in zip(infos, chunks, strict=True)]
        out = torch.empty(shape, dtype=dtype)  # not larger than the pieces that were read
        for (offsets, sizes), piece in zip(chunks, pieces, strict=True):
            ranges = zip(offsets, sizes, shape, strict=True)
            if any(low < 0 or low + extent > full for low, extent, full in ranges):
                msg = (
                    f"a stored piece of the tensor {self.name} lies outside of its shape "
                    f"{list(shape)}"
                )
                raise CheckpointError(msg)
            box = [slice(low, low + extent) for low, extent in zip(offsets, sizes, strict=True)]
            out[tuple(box)] = piece
        return out

    def _piece(self, info: Any, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if vars(info).get("transform_descriptors"):
            msg = (
                f"the tensor {self.name} is stored with transforms "
                f"({info.transform_descriptors}), which braid cannot undo: load the checkpoint "
                "with torch"
            )
            raise CheckpointError(msg)
        with regular_file(self.directory, info.relative_path).open("rb") as file:
            file.seek(info.offset)
            raw = file.read(info.length)
        piece = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        if not isinstance(piece, torch.Tensor) or (piece.shape, piece.dtype) != (sizes, dtype):
            msg = (
                f"a stored piece of {self.name} is not a tensor of {dtype} and shape "
                f"{list(sizes)}: the checkpoint is damaged"
            )
            raise CheckpointError(msg)
        return piece


def _sizes(index: Any) -> tuple[int, ...] | None:
    offset = vars(index).get("offset")
    return None if offset is None else tuple(offset)


def _refused(what: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(
        f"the metadata contains {what}, which a distributed checkpoint never contains: do not load "
        "this file, it may be unsafe"
    )


def _read_metadata(path: Path) -> Any:
    kinds: dict[str, type] = {}

    class Described:
        """Base of the stand-in classes, which are created for each file."""

        def __new__(cls, *args: Any) -> Described:
            made = super().__new__(cls)
            made.__dict__["state"] = args
            return made

        def __setstate__(self, state: Any) -> None:
            self.__dict__.update(state if isinstance(state, dict) else {"state": state})

        def __hash__(self) -> int:
            return hash((self.__dict__.get("fqn"), self.__dict__.get("offset")))

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Described) and self.__dict__ == other.__dict__

    def stand_in(name: str) -> type:
        return kinds.setdefault(name, type(name, (Described,), {}))

    def member(kind: Any, name: Any) -> Any:
        """Return a member of the enum; stands for `getattr`."""
        if kind is not stand_in(_ENUM) or name not in _MEMBERS:
            raise _refused(f"builtins.getattr for {str(name)[:80]!r}")
        return kind(_MEMBERS.index(name))

    values = {**_VALUES, "builtins.getattr": member}

    class Restricted(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            value = values.get(f"{module}.{name}")
            if value is None and module == "torch":
                value = getattr(torch, name, None)
                value = value if value is torch.Size or isinstance(value, torch.dtype) else None
            if value is None and name in _CLASSES.get(module, ()):
                value = stand_in(name)
            if value is None:
                raise _refused(f"{module}.{name}")
            return value

    with path.open("rb") as file:
        return Restricted(file).load()
