"""Frames arrive as they were sent, however the stream is cut; anything else is a clear error."""

from __future__ import annotations

import contextlib
import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import CommError, ConfigError
from braid.runtime.wire import FrameDecoder, FrameLimits, encode

SMALL = FrameLimits(max_meta_bytes=64, max_buffers=4, max_frame_bytes=256)

messages = st.lists(
    st.tuples(st.binary(max_size=64), st.lists(st.binary(max_size=40), max_size=4)), max_size=6
)


def stream_of(frames):
    return b"".join(bytes(piece) for meta, buffers in frames for piece in encode(meta, buffers))


def plain(frames):
    return [(frame.meta, [bytes(buffer) for buffer in frame.buffers]) for frame in frames]


@given(messages, st.lists(st.integers(1, 300), max_size=50))
def test_frames_survive_any_split(frames, cuts):
    stream, decoder, found = stream_of(frames), FrameDecoder(SMALL), []
    for cut in [*cuts, len(stream)]:
        found += decoder.feed(stream[:cut])
        stream = stream[cut:]
    assert plain(found) == frames
    assert not decoder.in_frame


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_any_bytes_give_frames_within_the_limits_or_a_clear_error(pieces):
    decoder, asked = FrameDecoder(SMALL), []

    def allocate(meta, sizes):
        asked.append(len(meta) + sum(sizes))
        return [memoryview(bytearray(size)) for size in sizes]

    with contextlib.suppress(CommError):
        for piece in pieces:
            decoder.feed(piece, allocate)
    assert all(nbytes <= SMALL.max_frame_bytes for nbytes in asked)


@given(
    st.integers(0, 0xFFFF),
    st.integers(0, 0xFFFFFFFF),
    st.lists(st.integers(0, 2**64 - 1), max_size=4),
)
def test_forged_lengths_are_refused_before_anything_is_allocated(count, meta_bytes, sizes):
    decoder = FrameDecoder(SMALL)
    head = struct.pack("<2sHI", b"BF", count, meta_bytes) + struct.pack(f"<{len(sizes)}Q", *sizes)

    def allocate(meta, sizes):
        assert len(meta) + sum(sizes) <= SMALL.max_frame_bytes
        return [memoryview(bytearray(size)) for size in sizes]

    data = head + bytes(256)
    if meta_bytes > 64 or count > 4:
        with pytest.raises(CommError, match=r"limit (64|4)\)"):
            decoder.feed(data, allocate)
    else:
        with contextlib.suppress(CommError):
            decoder.feed(data, allocate)


def test_a_frame_of_four_gibibytes_is_refused():
    head = struct.pack("<2sHIQ", b"BF", 1, 0, 4 << 30)
    with pytest.raises(CommError, match=r"too large: 4294967296 bytes \(limit 1073741824\)"):
        FrameDecoder().feed(head)


def test_bytes_that_are_no_head_are_shown():
    with pytest.raises(
        CommError, match="b'GET / HT' is not the head of a frame: close the connection"
    ):
        FrameDecoder().feed(b"GET / HTTP/1.1")


def test_payloads_go_straight_into_the_memory_that_was_asked_for():
    home = bytearray(60_000)
    asked = []

    def allocate(meta, sizes):
        asked.append((meta, sizes))
        return [memoryview(home)[:18_000], memoryview(home)[18_000:]]

    payload = [bytes([1]) * 18_000, bytes([2]) * 42_000]
    stream = io.BytesIO(b"".join(map(bytes, encode(b"tensors", payload))))
    decoder, targets, frame = FrameDecoder(), [], None

    def read_into(target):
        targets.append(target.obj is home)
        return stream.readinto(target)

    while (frame := decoder.next_frame(allocate)) is None:
        assert decoder.read(read_into)
    assert (asked, targets) == ([(b"tensors", (18_000, 42_000))], [False, True, True])
    assert (bytes(home), frame.buffers[0].obj is home) == (b"".join(payload), True)


def test_encoding_does_not_copy_payloads():
    payload = bytearray(1000)
    pieces = encode(b"m", [payload])
    assert pieces[1].obj is payload


def test_a_long_head_is_read_whole():
    frames = [(b"m" * 60_000, [b"x"] * 1000)]
    assert plain(FrameDecoder().feed(stream_of(frames * 2))) == frames * 2


@pytest.mark.parametrize(
    ("meta", "buffers", "too_large"),
    [
        (b"m" * 65, [], "65 bytes of meta"),
        (b"", [b""] * 5, "5 buffers"),
        (b"m", [b"x" * 256], "257 bytes"),
    ],
)
def test_the_sender_is_told_what_the_receiver_would_refuse(meta, buffers, too_large):
    with pytest.raises(ConfigError, match=f"too large: {too_large}"):
        encode(meta, buffers, SMALL)


def test_buffers_with_gaps_are_refused():
    with pytest.raises(ConfigError, match="send a contiguous copy"):
        encode(b"", [memoryview(bytes(10))[::2]])


def test_allocating_other_sizes_than_asked_is_refused():
    stream = stream_of([(b"", [b"abc"])])
    for wrong in (bytearray(2), bytes(3)):
        with pytest.raises(ConfigError, match=r"writable memory of \(3,\) bytes"):
            FrameDecoder().feed(stream, lambda _meta, _sizes, wrong=wrong: [memoryview(wrong)])


def test_limits_out_of_range_are_all_named():
    with pytest.raises(ConfigError, match=r"max_meta_bytes = 70000 .* max_buffers = -1"):
        FrameLimits(max_meta_bytes=70_000, max_buffers=-1)
