"""Manifests: what is written is read, what was altered or reaches outside is refused."""

from __future__ import annotations

import hashlib
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.checkpoint import FileEntry, Manifest, Piece, TensorEntry
from braid.checkpoint.manifest import decode_manifest, encode_manifest
from braid.errors import CheckpointError

FILE = FileEntry(100, "0" * 64)


def manifest(**changes: object) -> Manifest:
    halves = (Piece("a", "w", (0, 0), (2, 3)), Piece("b", "w", (2, 0), (2, 3)))
    whole = Manifest(
        step=7,
        tensors={"w": TensorEntry((4, 3), "float32", halves)},
        files={"a": FILE, "b": FILE},
        state={"epoch": 1, "lr": 0.1},
        numerics={"threads": 1},
    )
    return msgspec.structs.replace(whole, **changes)


def sealed(content: object) -> bytes:
    raw = json.dumps(content).encode()
    digest = hashlib.sha256(raw).hexdigest().encode()
    return b'{"sha256":"' + digest + b'","manifest":' + raw + b"}"


def plain(**changes: object) -> object:
    return {**msgspec.to_builtins(manifest()), **changes}


def test_what_is_written_is_read():
    assert decode_manifest(encode_manifest(manifest())) == manifest()


def test_numbers_keep_their_bits():
    numbers = {"lr": 0.1 + 0.2, "tiny": 5e-324}
    assert decode_manifest(encode_manifest(manifest(state=numbers))).state == numbers


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_no_flipped_byte_changes_what_is_read(position, flip):
    data = bytearray(encode_manifest(manifest()))
    data[position % len(data)] ^= flip
    try:
        found = decode_manifest(bytes(data))
    except CheckpointError:
        return
    assert found == manifest()


@given(st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_a_checkpoint_error(data):
    with pytest.raises(CheckpointError):
        decode_manifest(data)


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "/etc/passwd", "", "manifest.json"])
def test_a_file_name_that_leaves_the_directory_is_refused(name):
    content = plain(files={name: {"nbytes": 1, "sha256": "0" * 64}}, tensors={})
    with pytest.raises(CheckpointError, match=r"file name .* is not allowed"):
        decode_manifest(sealed(content))


BOXES = {
    "a hole": [("a", (0, 0), (2, 3))],
    "an overlap": [("a", (0, 0), (3, 3)), ("b", (1, 0), (1, 3))],
    "twice the same": [("a", (0, 0), (2, 3)), ("b", (0, 0), (2, 3))],
    "outside": [("a", (0, 0), (2, 3)), ("b", (3, 0), (2, 3))],
    "negative": [("a", (-2, 0), (4, 3))],
    "other dims": [("a", (0,), (12,))],
    "unknown file": [("c", (0, 0), (4, 3))],
}


@pytest.mark.parametrize("boxes", BOXES.values(), ids=BOXES)
def test_pieces_that_do_not_tile_their_tensor_are_refused(boxes):
    pieces = tuple(Piece(file, "w", offset, shape) for file, offset, shape in boxes)
    with pytest.raises(CheckpointError, match=r"tensor 'w' has .*piece"):
        encode_manifest(manifest(tensors={"w": TensorEntry((4, 3), "float32", pieces)}))


def test_every_problem_is_reported_at_once():
    with pytest.raises(CheckpointError) as caught:
        encode_manifest(manifest(step=-1, files={"a": FileEntry(-1, "x"), "b": FILE}))
    assert str(caught.value) == (
        "manifest.json is inconsistent: step is -1; file a has a length or digest that cannot be"
    )


def test_a_newer_format_says_so():
    content = plain(braid={"version": "9.0", "format": 2}, step="something new")
    with pytest.raises(CheckpointError, match=r"braid 9.0 in format 2; this braid knows 1"):
        decode_manifest(sealed(content))


def test_a_huge_shape_allocates_nothing():
    content = plain(tensors={"w": {"shape": [1 << 61] * 3, "dtype": "float32", "pieces": []}})
    with pytest.raises(CheckpointError, match="do not add up"):
        decode_manifest(sealed(content))


def test_a_tensor_larger_than_its_files_is_refused():
    whole = {"file": "a", "key": "w", "offset": [0], "shape": [1 << 61]}
    content = plain(tensors={"w": {"shape": [1 << 61], "dtype": "float32", "pieces": [whole]}})
    with pytest.raises(CheckpointError, match="more elements than its files have bytes"):
        decode_manifest(sealed(content))


def test_state_that_json_does_not_know_is_refused():
    with pytest.raises(CheckpointError, match="as JSON knows them"):
        encode_manifest(manifest(state={"x": object()}))
