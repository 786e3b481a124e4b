"""Manifest of a checkpoint: one JSON file that is written last.

Problem: a pickled index can execute code when it is read, and shards without digests are loaded
with flipped bits. Idea: a JSON manifest that lists every file with its length and SHA-256, and
every tensor with its pieces. The manifest contains a digest of itself. A directory without a
manifest is not a checkpoint, so a crash at any time leaves a complete checkpoint or none.

    step-00000200/
        manifest.json           {"sha256": "...",
                                 "manifest": {step, tensors, files, state, numerics, braid}}
        rank-00000.safetensors  pieces of rank 0
        rank-00001.safetensors  ...

A manifest is untrusted input: sizes, names and shapes are checked before memory is allocated or
files are opened.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from itertools import product
from typing import Any

import msgspec

from braid._version import __version__
from braid.errors import CheckpointError

__all__ = [
    "FORMAT",
    "MANIFEST_NAME",
    "MAX_MANIFEST_BYTES",
    "MAX_STEP",
    "FileEntry",
    "Manifest",
    "Origin",
    "Piece",
    "TensorEntry",
    "decode_manifest",
    "encode_manifest",
]

FORMAT = 1
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20  # about 300,000 tensors
MAX_STEP = 10**18 - 1  # directory names have up to 18 digits
MAX_DIMS = 16
MAX_CORNERS = 1 << 20  # corners of all pieces of a tensor: 260,000 pieces in two dims
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
SHA256 = re.compile(r"[0-9a-f]{64}")


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A box of a tensor, stored under `key` in `file`.

    Attributes:
        file: Name of a file of the checkpoint.
        key: Name of the tensor in the file.
        offset: First index of the box, per dim.
        shape: Extent of the box, per dim.
    """

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Manifest entry of a whole tensor.

    Attributes:
        shape: Global shape.
        dtype: Dtype by torch's name without the prefix.
        pieces: Boxes that tile the tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Manifest entry of a file.

    Attributes:
        nbytes: Length in bytes.
        sha256: Digest in hexadecimal digits.
    """

    nbytes: int
    sha256: str


class Origin(msgspec.Struct, frozen=True):
    """Program that wrote the checkpoint.

    Attributes:
        version: Version of braid.
        format: Version of the format.
        writer: Process that wrote the manifest, as `pid 812 on host a`; empty in older
            manifests.
    """

    version: str = __version__
    format: int = FORMAT
    writer: str = ""


class Manifest(msgspec.Struct, frozen=True):
    """Contents of a checkpoint.

    Attributes:
        step: Number of completed steps.
        tensors: Tensors by name.
        files: Files by name.
        state: Values that are not tensors: position in the data, optimizer's numbers, seeds, digest
            of the data.
        numerics: Settings that affect the bits of the result: threads, order of sums, algorithms,
            world size, torch's version.
        braid: Version of braid that wrote the checkpoint.
    """

    step: int
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    state: dict[str, Any] = {}
    numerics: dict[str, Any] = {}
    braid: Origin = Origin()

    @property
    def nbytes(self) -> int:
        """Total bytes of all files."""
        return sum(entry.nbytes for entry in self.files.values())


class _Sealed(msgspec.Struct, forbid_unknown_fields=True):
    sha256: str
    manifest: msgspec.Raw


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON with its digest.

    Raises:
        CheckpointError: The manifest is inconsistent, or has values that are not JSON values.
    """
    _refuse(problems_of(manifest))
    try:
        raw = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    except (TypeError, ValueError) as exc:
        msg = (
            "state and numerics of a checkpoint must be JSON values (numbers, text, lists and "
            f"dicts): {exc}"
        )
        raise CheckpointError(msg) from exc
    if len(raw) > MAX_MANIFEST_BYTES - 256:
        msg = (
            f"the manifest of a checkpoint must be smaller than {MAX_MANIFEST_BYTES:,} bytes, "
            f"got {len(raw):,}"
        )
        raise CheckpointError(msg)
    return msgspec.json.encode(_Sealed(hashlib.sha256(raw).hexdigest(), msgspec.Raw(raw)))


def decode_manifest(data: bytes) -> Manifest:
    """Decode JSON from `encode_manifest`, and check it.

    Raises:
        CheckpointError: The data is not a manifest, was altered, has a newer format, or is
            inconsistent; the message names all problems.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        msg = f"{MANIFEST_NAME} is larger than {MAX_MANIFEST_BYTES:,} bytes"
        raise CheckpointError(msg)
    try:
        sealed = _SEALED.decode(data)
        if hashlib.sha256(sealed.manifest).hexdigest() != sealed.sha256:
            msg = f"sha256 mismatch in {MANIFEST_NAME}"
            raise CheckpointError(msg)
        origin = _HEAD.decode(sealed.manifest).braid
        if origin.format > FORMAT:
            msg = (
                f"it was written by braid {origin.version} in format {origin.format}, but this "
                f"version of braid reads format {FORMAT}: install braid {origin.version}"
            )
            raise CheckpointError(msg)
        manifest = _MANIFEST.decode(sealed.manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        msg = f"{MANIFEST_NAME} is damaged: {exc}"
        raise CheckpointError(msg) from exc
    _refuse(problems_of(manifest))
    return manifest


class _ManifestHead(msgspec.Struct):
    braid: Origin


# at import: msgspec (0.22) crashes if two threads make the first decoder of a type concurrently
_SEALED = msgspec.json.Decoder(_Sealed)
_HEAD = msgspec.json.Decoder(_ManifestHead)
_MANIFEST = msgspec.json.Decoder(Manifest)


def problems_of(manifest: Manifest) -> list[str]:
    """Return all contradictions in a manifest, and all unsafe file names."""
    fits = 0 <= manifest.step <= MAX_STEP
    problems = [] if fits else [f"step is not from 0 to {MAX_STEP:,}"]
    for name, file in manifest.files.items():
        if not FILE_NAME.fullmatch(name) or name == MANIFEST_NAME:
            problems.append(f"file name {name[:80]!r} is not allowed")
        if file.nbytes < 0 or not SHA256.fullmatch(file.sha256):
            problems.append(f"file {name[:80]} has an invalid length or digest")
    for name, entry in manifest.tensors.items():
        if problem := _problem_of(entry, manifest.files):
            problems.append(f"tensor {name[:80]!r} {problem}")
    return problems


def _problem_of(entry: TensorEntry, files: dict[str, FileEntry]) -> str:
    shape = entry.shape
    if len(shape) > MAX_DIMS or any(not 0 <= extent < 1 << 62 for extent in shape):
        return f"has the impossible shape {list(shape[:MAX_DIMS])}"
    for piece in entry.pieces:
        if piece.file not in files:
            return f"has a piece in {piece.file[:80]!r}, which is not a file of the checkpoint"
        inside = len(piece.offset) == len(piece.shape) == len(shape) and all(
            min(low, extent) >= 0 and low + extent <= full
            for low, extent, full in zip(piece.offset, piece.shape, shape, strict=True)
        )
        if not inside:
            return f"has a piece outside of its shape {list(shape)}"
    if sum(math.prod(piece.shape) for piece in entry.pieces) != math.prod(shape):
        return f"has pieces that do not add up to its shape {list(shape)}"
    if math.prod(shape) > sum(files[name].nbytes for name in {p.file for p in entry.pieces}):
        return f"of shape {list(shape)} has more elements than its files have bytes"
    return _overlap(entry) if math.prod(shape) else ""


def _overlap(entry: TensorEntry) -> str:
    """Return a problem if boxes with the volume of a tensor do not tile the tensor.

    A box is represented by its corners with signs: + - in one dim, + - - + in two. These are the
    derivative of the box's indicator function by all dims. Corners of neighbouring boxes cancel. So
    boxes in any number and order tile the tensor if and only if the remaining corners are the
    corners of the tensor.

    Cost: pieces x 2^(number of cut dims).
    """
    shape = entry.shape
    cut = [dim for dim, full in enumerate(shape) if any(p.shape[dim] != full for p in entry.pieces)]
    if len(entry.pieces) << len(cut) > MAX_CORNERS:
        return (
            f"is cut into {len(entry.pieces):,} pieces along {len(cut)} dims, more than can be "
            "checked"
        )
    corners: Counter[tuple[int, ...]] = Counter()
    boxes = [(1, piece.offset, piece.shape) for piece in entry.pieces]
    for weight, offset, extent in [(-1, (0,) * len(shape), shape), *boxes]:
        for ends in product((0, 1), repeat=len(cut)):
            corner = tuple(offset[d] + end * extent[d] for d, end in zip(cut, ends, strict=True))
            corners[corner] += weight * (-1) ** sum(ends)
    return "has pieces that overlap" if any(corners.values()) else ""


def _refuse(problems: list[str]) -> None:
    if problems:
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CheckpointError(f"{MANIFEST_NAME} is inconsistent: {'; '.join(problems[:10])}{more}")
