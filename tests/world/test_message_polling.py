"""Which thread polls the streams of a van, and that none is missing when it is needed."""

from __future__ import annotations

import contextlib
import os
import select
import threading

import pytest

from braid.errors import StaleError
from braid.runtime.message import SocketVan, VanConfig
from braid.runtime.wire import Secret
from support.message_conformance import CONFORMANCE_SCHEMA, Note

SECRET = Secret.generate()


@contextlib.contextmanager
def pair(config=None):
    """Two vans that are connected."""
    kwargs = {"secret": SECRET, "run_id": "run", "config": config}
    address = f"unix:@braid-polling-{os.getpid()}"
    with (
        SocketVan("worker:0", CONFORMANCE_SCHEMA, **kwargs) as here,
        SocketVan("worker:1", CONFORMANCE_SCHEMA, listen=address, **kwargs) as there,
    ):
        here.connect("worker:1", address, timeout_s=10)
        there.wait_for(["worker:0"], 10)
        yield here, there
        here.close(0)
        there.close(0)


def until(condition):
    """Wait, outside of any van, until other threads have made the condition true."""
    for _ in range(10_000):
        if condition():
            return True
        threading.Event().wait(0.001)
    return False


def test_a_thread_that_waits_receives_by_itself():
    with pair() as (here, there):
        threads = []
        there.receive_into(Note, lambda *_: threads.append(threading.current_thread()))
        for number in range(10_000):
            here.send("worker:1", Note(number), buffers=[b"x"])
            there.recv(10)
            if threading.current_thread() in threads:
                break
        assert threading.current_thread() in threads


def test_messages_arrive_while_nobody_waits():
    with pair() as (here, there):
        here.send("worker:1", Note(1), buffers=[bytes(20 << 20)])
        assert until(lambda: there.statistics().unread == 1)
        assert there.try_recv().message == Note(1)


def test_a_program_that_computes_is_not_lost_and_loses_nobody():
    config = VanConfig(heartbeat_s=0.02, lost_after_s=0.3)
    with pair(config) as (here, there):
        here.send("worker:1", Note(1))
        assert there.recv(10).message == Note(1)
        start_ns = here.clock.now_ns()
        links = [link for van in (here, there) for link in van._state._links.values()]
        assert until(lambda: min(link.received_ns for link in links) - start_ns > 400_000_000)
        assert (here.peers, there.peers) == (("worker:1",), ("worker:0",))


def test_a_selector_shows_what_came_after_a_wait():
    with pair() as (here, there):
        fd = there.fileno()
        for number in range(5):
            here.send("worker:1", Note(2 * number))
            assert there.recv(10).message == Note(2 * number)
            here.send("worker:1", Note(2 * number + 1))
            assert select.select([fd], [], [], 10)[0] == [fd]
            assert there.try_recv().message == Note(2 * number + 1)


def test_each_of_several_threads_that_wait_gets_its_message():
    with pair() as (here, there):
        got = []
        threads = [threading.Thread(target=lambda: got.append(there.recv(10))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for number in range(6):
            here.send("worker:1", Note(number))
        for thread in threads:
            thread.join()
        assert sorted(each.message.number for each in got) == list(range(6))


def test_closing_wakes_all_threads_that_wait():
    with pair() as (_, there):
        errors = []

        def wait():
            with pytest.raises(StaleError):
                there.recv()
            errors.append(True)

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert until(lambda: there._turns.is_taken)
        there.close(0)
        for thread in threads:
            thread.join()
        assert errors == [True] * 3


def test_interrupted_reading_loses_the_peer_and_nothing_else(monkeypatch):
    with pair() as (here, there):
        received = there._state.frame_received

        def interrupted(*args):
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            return received(*args)

        monkeypatch.setattr(there._state, "frame_received", interrupted)

        def converse():
            for number in range(10_000):
                here.send("worker:1", Note(number))
                there.recv(10)

        with pytest.raises(KeyboardInterrupt):  # in the first message that this thread reads
            converse()
        while isinstance(lost := there.recv(10).message, Note):
            pass
        assert "was interrupted while it read" in lost.reason
        assert not here.recv(10).message.orderly


def test_forked_process_leaves_the_van_to_its_parent():
    with pair() as (here, there):
        with there._guard:  # held by another thread at the time of the fork, as it may be
            child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                try:
                    there.recv(1)
                except StaleError as exc:
                    there.close()
                    code = 0 if "belongs to the parent" in str(exc) else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        here.send("worker:1", Note(1))
        assert there.recv(10).message == Note(1)
