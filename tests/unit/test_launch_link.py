"""Claims of what launcher and agent say: a first line behind any noise, then messages that survive the wire."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid._version import __version__
from braid.launch.cluster.agent_channel import MAX_LINE, MAX_NOISE, FirstLine, first_line
from braid.launch.cluster.agent_messages import (
    AGENT_SCHEMA,
    AgentHello,
    FinalRecord,
    Finish,
    Finished,
    OpenWaits,
    Output,
    Pong,
    ProcessChanged,
    RankStarted,
    Signalled,
    SignalRequest,
    Start,
    priority_of,
)
from braid.launch.process.hang_state import OpenWait
from braid.runtime.rendezvous import JobEnvironment


@given(
    st.lists(st.binary(max_size=40)).map(b"".join).filter(lambda noise: b"\0" not in noise),
    st.binary(max_size=40),
    st.lists(st.integers(1, 50)),
)
def test_a_greeting_of_the_far_shell_is_kept_apart_wherever_the_stream_is_cut(noise, rest, cuts):
    stream = noise + first_line()
    line = FirstLine()
    for size in [*cuts, len(stream)]:
        chunk, stream = stream[:size], stream[size:]
        if chunk and line.feed(chunk if stream else chunk + rest):
            break
    assert (line.version, line.noise, line.rest) == (__version__, noise, rest)


def test_of_endless_noise_little_is_kept_and_the_line_is_still_found():
    line = FirstLine()
    for _ in range(4):
        assert not line.feed(b"x" * MAX_NOISE)
        assert len(line.noise) <= MAX_NOISE + MAX_LINE
    assert line.feed(first_line())
    assert line.version == __version__


TOLD = JobEnvironment(rank=0, world_size=1, run_id="r", store_address="tcp://10.0.0.1:1")


@pytest.mark.parametrize(
    "message",
    [AgentHello("1", "h", 7, 1, 2, 3, ("t.py",)), ProcessChanged(1, "killed", 9, 5), OpenWaits((OpenWait(1, 2, 3, 4),)), Start(TOLD)],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_messages_of_agents_survive_the_wire(message):
    assert AGENT_SCHEMA.decode(*AGENT_SCHEMA.encode(message), sender="agent") == message


def test_fields_that_a_later_braid_adds_do_not_hide_its_version():
    said = {"type": "AgentHello", "version": "2", "hostname": "h", "pid": 7, "color": "blue"}
    found = AGENT_SCHEMA.decode("AgentHello", msgspec.msgpack.encode(said), sender="agent")
    assert found == AgentHello("2", "h", 7)


def test_only_what_must_follow_the_output_of_ranks_waits_for_it():
    last = [Output(0, 1), FinalRecord(0, ()), ProcessChanged(0, "exited", 0, 0), Finished()]
    others = [
        Finish(),
        SignalRequest(0, 9),
        Signalled(2),
        Pong(0, 0),
        OpenWaits(()),
        RankStarted(0, 1),
    ]
    assert {priority_of(each) for each in last} == {0}
    assert min(priority_of(each) for each in others) > 0
