"""Claims of the launcher's end of its agents: how they are started, forgotten and ended, without any that work."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import subprocess
import weakref

import pytest

from braid.errors import ConfigError
from braid.launch.cluster.agent_handle import END_LIMIT_S
from braid.launch.cluster.agent_registry import AgentRegistry
from braid.launch.cluster.join import join_first_node, open_join_listener
from braid.launch.cluster.options import Nodes
from braid.launch.cluster.remote_shell import LocalPlacement, RshPlacement
from braid.launch.process.job import JobSpec
from braid.runtime.clock import MonotonicClock, VirtualClock
from braid.runtime.rendezvous.file_meeting import FileMeeting
from braid.runtime.rendezvous.meeting import MeetingPoint
from braid.runtime.wire import Connection, Identity
from support.leaks import no_leaks

pytestmark = pytest.mark.launcher


def unheard(*_: object) -> None:
    """Nobody listens."""


class Hung:
    """A placement whose command does nothing and never ends."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.waits: list[float] = []

    def start(self) -> Hung:
        self.reader, written = os.pipe()
        self.errors, unread = os.pipe()
        read, self.writer = os.pipe()
        for fd in (written, unread, read):
            os.close(fd)
        return self

    def wait(self, timeout_s: float) -> int:
        self.waits.append(timeout_s)
        self.clock.advance(round(timeout_s * 1e9))
        return -9


def test_agents_that_do_not_end_are_waited_for_together():
    clock = VirtualClock()
    hung = [Hung(clock) for _ in range(3)]
    with no_leaks():
        board = AgentRegistry(clock)
        for node, placement in enumerate(hung):
            board.start(node, "a", placement, unheard, unheard)
        board.close()
    assert sorted(seconds for one in hung for seconds in one.waits) == [0, 0, END_LIMIT_S]


def test_who_came_by_itself_and_went_is_forgotten_and_may_come_again():
    def come(board: AgentRegistry) -> tuple[weakref.ref, socket.socket]:
        ours, theirs = socket.socketpair()
        connection = Connection(ours, Identity("run", "agent", 1))
        return weakref.ref(board.admit(connection, unheard, unheard)), theirs

    with no_leaks(), selectors.DefaultSelector() as selector:
        board = AgentRegistry(MonotonicClock())
        board.register(selector)
        (gone, its_end), (stays, other_end) = come(board), come(board)
        its_end.close()
        while gone() is not None:
            for key, _ in selector.select(10):
                key.data()
        again, last_end = come(board)
        assert (stays() is not None, again() is not None) == (True, True)
        other_end.close()
        last_end.close()
        board.close()


@pytest.mark.parametrize("placement", [LocalPlacement(), RshPlacement("b")])
def test_a_host_that_has_no_descriptors_left_says_so_and_not_that_ssh_is_missing(
    monkeypatch, placement
):
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(ConfigError, match=r"Too many open files; use fewer hosts, or raise"):
        placement.start()


def test_a_node_0_that_cannot_listen_leaves_no_file_for_the_next_run(tmp_path):
    path = str(tmp_path / "meeting")
    nodes = Nodes(
        meeting=MeetingPoint(2, 0, path=path), insecure_network=True, interfaces=("eth77",)
    )
    with (
        FileMeeting(path, 2, 0) as meeting,
        pytest.raises(ConfigError, match="address on eth77"),
        open_join_listener(nodes, MonotonicClock(), meeting),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_node_0_that_only_its_own_host_can_reach_is_named_at_once(tmp_path):
    class Found:
        node_rank = 1

        def find(self, timeout_s: float) -> list[str]:  # noqa: ARG002 - as FileMeeting has it
            return ["another machine", "tcp://127.0.0.1:9"]

    point = MeetingPoint(2, 1, path="/shared/job7")
    nodes = Nodes(meeting=point, insecure_network=True)
    with pytest.raises(
        ConfigError, match=r"node 1 cannot reach node 0: /shared/job7 lists tcp://127.0.0.1:9."
    ):
        join_first_node(JobSpec(command=("a.py",)), nodes, MonotonicClock(), unheard, Found())
