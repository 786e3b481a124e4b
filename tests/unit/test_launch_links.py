"""Claims of braid.launch.process.links: the kernel's view of the connections of a process."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from braid.launch.process import links


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no sock_diag")
def test_what_comes_in_on_a_connection_is_counted():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as end,
    ):
        ports = (client.getsockname()[1], client.getpeername()[1])

        def seen() -> links._TcpSocket:
            (one,) = [one for one in links._sockets() if one.ports == ports]
            return one

        before = seen()
        end.sendall(b"x")
        client.recv(1)
        after = seen()
        assert (after.local, after.peer, after.num_repeats) == ("127.0.0.1", "127.0.0.1", 0)
        assert after.num_segments == before.num_segments + 1
        assert after.inode == os.fstat(client.fileno()).st_ino
        assert after.inode in links._inodes_of(os.getpid())


def test_a_sign_of_life_is_a_change_of_the_number_of_segments(monkeypatch):
    now = links._TcpSocket("10.0.0.1", "10.0.0.2", (1, 2), 7, 0, 3, 10)
    shown = []
    monkeypatch.setattr(links, "_inodes_of", lambda _: {7})
    monkeypatch.setattr(links, "_sockets", lambda: shown)
    observer, s = links.LinkObserver(1), 10**9
    for at_s, one, expected_s in [
        (5, now, 4.997),
        (6, now._replace(num_repeats=2), 4.997),
        (7, now._replace(num_segments=11, num_repeats=3), 7),
        (9, now._replace(num_segments=11, num_repeats=4), 7),
    ]:
        shown[:] = [one, one._replace(peer="127.0.0.1"), one._replace(inode=8)]
        (link,) = observer.look(at_s * s)
        assert link == ("10.0.0.1", "10.0.0.2", round(expected_s * s), one.num_repeats)
