"""Claims of the link between launcher and agent: whatever comes before the first line, frames arrive whole and in order."""

from __future__ import annotations

import contextlib
import os
import selectors

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid._version import __version__
from braid.errors import CommError, PeerLostError
from braid.launch.agent_messages import (
    Bye,
    Changed,
    Ping,
    Ready,
    Waits,
    decode_from_agent,
    decode_to_agent,
    encode,
)
from braid.launch.channel import Channel
from braid.launch.hang_state import OpenWait
from braid.launch.link import PipeLink, first_line


@pytest.fixture
def pipes():
    there, back = os.pipe(), os.pipe()
    with contextlib.ExitStack() as stack:
        launcher = PipeLink(back[0], there[1], "host b", expects_line=True)
        stack.callback(launcher.close)
        yield launcher, there[0], back[1]
        for fd in (there[0], back[1]):
            with contextlib.suppress(OSError):
                os.close(fd)


def test_a_greeting_of_the_far_shell_is_kept_apart(pipes):
    launcher, reader, writer = pipes
    os.write(writer, b"Welcome to b!\n" + first_line())
    agent = PipeLink(os.dup(reader), os.dup(writer), "the launcher")
    agent.post(b"", [b"one"])
    agent.post(b"", [b"two" * 5000])
    frames = [launcher.try_recv(), launcher.try_recv(), launcher.try_recv()]
    agent.close()
    assert [bytes(f.buffers[0]) for f in frames if f] == [b"one", b"two" * 5000]
    assert (launcher.version, launcher.noise) == (__version__, b"Welcome to b!\n")


def test_the_end_of_the_pipe_is_the_end_of_the_other_side(pipes):
    launcher, _, writer = pipes
    os.write(writer, b"command not found\n")
    assert launcher.try_recv() is None
    os.close(writer)
    with pytest.raises(PeerLostError, match="host b has closed its pipe"):
        launcher.try_recv()
    assert launcher.noise == b"command not found\n"


def test_what_does_not_fit_waits_until_there_is_room(pipes):
    launcher, reader, writer = pipes
    os.write(writer, first_line())
    lost, heard = [], []
    channel = Channel(launcher, heard.append, lost.append)
    with selectors.DefaultSelector() as selector:
        channel.watch(selector)
        for _ in range(3):
            channel.send(Ping(1), b"x" * 200_000)
        queued = channel.queued_bytes
        agent = PipeLink(os.dup(reader), os.dup(writer), "the launcher")
        frames = []
        while len(frames) < 3:
            for key, _ in selector.select(1):
                key.data()
            while (frame := agent.try_recv()) is not None:
                frames.append(frame)
        agent.close()
        sizes = [[len(buffer) for buffer in frame.buffers[1:]] for frame in frames]
        assert (queued > 0, channel.queued_bytes, sizes) == (True, 0, [[200_000]] * 3)
        os.close(writer)
        os.close(reader)
        channel.hear()
        channel.close()
    assert (lost, heard, channel.closed) == (["host b has closed its pipe"], [], True)


@pytest.mark.parametrize(
    "message", [Ready("1", "h", 7, 1, 2, 3, ("t.py",)), Changed(1, "killed", 9, 5), Waits((OpenWait(1, 2, 3, 4),))]
)  # fmt: skip
def test_messages_of_agents_survive_the_wire(message):
    assert decode_from_agent(encode(message)) == message


def test_fields_that_a_later_braid_adds_do_not_hide_its_version():
    said = {"type": "Ready", "version": "2", "hostname": "h", "pid": 7, "color": "blue"}
    assert decode_from_agent(msgspec.msgpack.encode(said)) == Ready("2", "h", 7)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_refused(data):
    for decode in (decode_from_agent, decode_to_agent):
        with contextlib.suppress(CommError):
            decode(data)


def test_a_goodbye_is_for_agents_only():
    with pytest.raises(CommError, match="expected a message of an agent"):
        decode_from_agent(encode(Bye(1)))
