"""Manifests: what is written is read, what was altered or reaches outside is refused."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from itertools import product
from operator import add
from typing import TypeAlias

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.checkpoint import FileEntry, Manifest, Piece, TensorEntry
from braid.checkpoint.manifest import decode_manifest, encode_manifest, problems_of
from braid.errors import CheckpointError

FILE = FileEntry(100, "0" * 64)
BIG = FileEntry(1 << 20, "0" * 64)
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


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


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor of one to three dims, cut again and again, its pieces in any order, and sometimes some moved."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8))):
        offset, extent = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, extent[dim]))
        lower = (*extent[:dim], at, *extent[dim + 1 :])
        upper = (*extent[:dim], extent[dim] - at, *extent[dim + 1 :])
        beside = (*offset[:dim], offset[dim] + at, *offset[dim + 1 :])
        boxes += [(offset, lower), (beside, upper)]
    for _ in range(draw(st.integers(0, 2))):
        index = draw(st.integers(0, len(boxes) - 1))
        extent = boxes[index][1]
        room = (full - e for full, e in zip(shape, extent, strict=True))
        boxes[index] = (tuple(draw(st.integers(0, most)) for most in room), extent)
    return shape, draw(st.permutations(boxes))


def refusal(shape: tuple[int, ...], boxes: list[Box]) -> str:
    pieces = tuple(Piece("a", str(i), *box) for i, box in enumerate(boxes))
    entry = TensorEntry(shape, "uint8", pieces)
    (problem,) = problems_of(manifest(tensors={"w": entry}, files={"a": BIG})) or [""]
    return problem


@given(tilings())
def test_pieces_are_accepted_if_and_only_if_each_element_is_in_one(tiling):
    shape, boxes = tiling
    held = Counter(
        element
        for offset, extent in boxes
        for element in product(*map(range, offset, map(add, offset, extent)))
    )
    tiles = held == Counter(product(*map(range, shape)))
    assert (refusal(shape, boxes) == "") is tiles


def test_of_many_pieces_one_that_overlaps_another_is_found():
    boxes: list[Box] = [((i, 2 * j), (1, 2)) for i in range(40) for j in range(5)]
    assert refusal((40, 10), boxes) == ""
    boxes[3] = ((0, 2), (1, 2))
    assert refusal((40, 10), boxes) == "tensor 'w' has pieces that overlap"


def test_more_pieces_along_more_dims_than_can_be_checked_are_refused(monkeypatch):
    monkeypatch.setattr("braid.checkpoint.manifest.MAX_CORNERS", 15)
    boxes: list[Box] = [((i, j), (1, 1)) for i in range(2) for j in range(2)]
    assert "4 pieces along 2 dims, more than can be checked" in refusal((2, 2), boxes)


@pytest.mark.parametrize("step", [10**18, 10**30, 10**300, -(10**30)])
def test_a_step_that_no_directory_can_have_is_refused(step):
    with pytest.raises(CheckpointError):
        decode_manifest(sealed(plain(step=0)).replace(b'"step": 0', b'"step": %a' % step))
    with pytest.raises(CheckpointError, match="step is not from 0 to"):
        encode_manifest(manifest(step=step))


def test_every_problem_is_reported_at_once():
    with pytest.raises(CheckpointError) as caught:
        encode_manifest(manifest(step=-1, files={"a": FileEntry(-1, "x"), "b": FILE}))
    assert str(caught.value) == (
        "manifest.json is inconsistent: step is not from 0 to 999,999,999,999,999,999; file a has "
        "an invalid length or digest"
    )


def test_a_newer_format_says_so():
    content = plain(braid={"version": "9.0", "format": 2}, step="something new")
    with pytest.raises(
        CheckpointError, match=r"braid 9.0 in format 2, but this version of braid reads format 1"
    ):
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
    with pytest.raises(CheckpointError, match="must be JSON values"):
        encode_manifest(manifest(state={"x": object()}))
