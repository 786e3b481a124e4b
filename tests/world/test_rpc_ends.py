"""Calls that are cancelled, that wait for room, that are sent again; nodes that come and go."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError

import pytest
import torch

from braid import rpc
from braid.errors import CommTimeout, ConfigError, PeerLostError, StaleError
from braid.rpc import RpcOptions
from braid.rpc.agent import Agent
from braid.rpc.current import acting_for
from braid.rpc.membership import join, leave
from braid.rpc.outcomes import RpcError
from braid.rpc.scope import Scope, enter
from braid.runtime.store import HashStore, PrefixStore
from rpc_nodes import SECRET, everywhere, first_of

ALLOWED = {"allowed_modules": ["test_rpc_ends"]}
RELEASED = threading.Event()
BEGUN: list[str] = []
ENDED: list[str] = []
NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def _release():
    RELEASED.clear()
    BEGUN.clear()
    ENDED.clear()
    yield
    RELEASED.set()


def until(is_so: Callable[[], bool]) -> None:
    """Wait for an event of another thread."""
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end, (BEGUN, ENDED)
        time.sleep(0.002)


def wait_for_release(name: str) -> str:
    BEGUN.append(name)
    RELEASED.wait(20)
    ENDED.append(name)
    return name


def work_until_cancelled(name: str) -> str:
    BEGUN.append(name)
    until(rpc.is_cancelled)
    ENDED.append(name)
    return name


def work_beyond_the_deadline() -> None:
    until(rpc.is_cancelled)
    ENDED.append("late")
    RELEASED.wait(20)


def double_late(values: torch.Tensor) -> torch.Tensor:
    wait_for_release("double")
    return 2 * values


def ask_back(node: str) -> int:
    return rpc.rpc_async(node, torch.add, (1, 2)).wait()


def name_of(node: rpc.RRef) -> str:
    return node.owner_name()


class Colour(enum.Enum):
    RED = 1


def colour() -> Colour:
    return Colour.RED


def call_further(node: str) -> None:
    BEGUN.append("first")
    try:
        rpc.rpc_sync(node, work_until_cancelled, ("second",))
    except CancelledError:
        ENDED.append("first")
        raise


# -- cancelling


def test_a_call_that_runs_learns_that_it_is_cancelled():
    with first_of(2, **ALLOWED):
        future = rpc.rpc_async("w1", work_until_cancelled, ("a",))
        until(lambda: BEGUN == ["a"])
        assert future.cancel()
        assert not future.cancel()
        with pytest.raises(CancelledError, match=r"work_until_cancelled in w1 was cancelled"):
            future.wait()
        until(lambda: ENDED == ["a"])
        assert not rpc.is_cancelled()


def test_a_call_that_has_not_begun_does_not_begin():
    with first_of(2, num_worker_threads=1, **ALLOWED) as agents:
        first = rpc.rpc_async("w1", wait_for_release, ("first",))
        until(lambda: BEGUN == ["first"])
        second = rpc.rpc_async("w1", wait_for_release, ("second",))
        assert second.cancel()
        until(lambda: agents[1].callee._cancelled)
        RELEASED.set()
        assert first.wait() == "first"
        assert not first.cancel()
        assert rpc.rpc_sync("w1", wait_for_release, ("third",)) == "third"
        assert BEGUN == ["first", "third"]
        assert agents[1].wait_idle(20)


def test_a_call_that_does_not_begin_leaves_no_reference():
    with first_of(2, num_worker_threads=1, **ALLOWED) as agents:
        value = rpc.remote("w1", torch.ones, (2,))
        assert value.to_here().tolist() == [1, 1]
        first = rpc.rpc_async("w1", wait_for_release, ("first",))
        until(lambda: BEGUN == ["first"])
        second = rpc.rpc_async("w1", name_of, (value,))
        assert second.cancel()
        until(lambda: agents[1].callee._cancelled)
        RELEASED.set()
        assert first.wait() == "first"
        del value
        until(lambda: agents[1].references.counts().shared == 0)
        until(lambda: not agents[0].caller._brought)


def test_a_call_does_not_begin_after_its_deadline():
    with first_of(2, num_worker_threads=1, **ALLOWED):
        first = rpc.rpc_async("w1", wait_for_release, ("first",))
        until(lambda: BEGUN == ["first"])
        with pytest.raises(CommTimeout):
            rpc.rpc_sync("w1", wait_for_release, ("late",), timeout=0.1)
        RELEASED.set()
        assert first.wait() == "first"
        assert rpc.rpc_sync("w1", wait_for_release, ("third",)) == "third"
        assert BEGUN == ["first", "third"]


def test_a_call_that_outlives_its_context_leaves_nothing():
    with first_of(2, **ALLOWED) as agents:
        with rpc.dist_autograd.context():
            late = rpc.rpc_async("w1", double_late, (torch.ones(2, requires_grad=True),))
            until(lambda: BEGUN == ["double"])
        until(lambda: not agents[1].contexts.numbers)
        RELEASED.set()
        assert late.wait().tolist() == [2, 2]
        assert late.wait().is_leaf
        assert [each.contexts.numbers for each in agents] == [(), ()]


def test_a_call_of_a_lost_node_learns_that_nobody_waits():
    with coming_and_going() as nodes:
        first = nodes.come("first", 0)
        nodes.come("second", 1)
        with acting_for(first):
            rpc.rpc_async("second", work_until_cancelled, ("alone",))
            until(lambda: BEGUN == ["alone"])
        first.close()
        until(lambda: ENDED == ["alone"])


def test_calls_of_a_cancelled_call_are_cancelled():
    with first_of(3, **ALLOWED):
        future = rpc.rpc_async("w1", call_further, ("w2",))
        until(lambda: BEGUN == ["first", "second"])
        assert future.cancel()
        until(lambda: sorted(ENDED) == ["first", "second"])


def test_a_function_learns_that_its_deadline_has_passed():
    with first_of(2, **ALLOWED):
        with pytest.raises(CommTimeout):
            rpc.rpc_sync("w1", work_beyond_the_deadline, timeout=0.3)
        until(lambda: ENDED == ["late"])
        RELEASED.set()


# -- room


def test_a_caller_waits_when_a_node_has_too_many_of_its_calls():
    with first_of(3, max_unanswered=2, **ALLOWED):
        held = [rpc.rpc_async("w1", wait_for_release, (str(n),)) for n in range(2)]
        with pytest.raises(CommTimeout, match=r"was not called, as w1 has not answered 2 calls"):
            rpc.rpc_async("w1", wait_for_release, ("more",), timeout=0.2)
        assert rpc.rpc_sync("w2", torch.add, (1, 1)) == 2  # others have room
        threading.Timer(0.1, RELEASED.set).start()
        assert rpc.rpc_sync("w1", wait_for_release, ("later",)) == "later"
        assert [each.wait() for each in held] == ["0", "1"]
        assert sorted(ENDED) == ["0", "1", "later"]
    with pytest.raises(ConfigError, match="max_unanswered must be at least 1, got 16 and 0"):
        RpcOptions(max_unanswered=0)


def test_calls_that_run_do_not_hold_answers_up():
    with first_of(2, num_worker_threads=1, **ALLOWED):
        assert rpc.rpc_sync("w1", ask_back, ("w0",), timeout=10) == 3


def test_an_answer_that_does_not_fit_is_an_error_at_once():
    with first_of(2, **ALLOWED) as agents:
        agents[0].codec.names._known["test_rpc_ends:Colour"] = enum.Enum("Colour", ["BLUE"])
        for call in (rpc.rpc_sync, lambda *args: rpc.rpc_async(*args).wait()):
            with pytest.raises(RpcError, match="Colour of this node has no member 'RED'"):
                call("w1", colour)


# -- nodes that come and go


class Nodes:
    """Nodes without a fixed number, which share a store."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.agents: list[Agent] = []

    def come(self, name: str, rank: int) -> Agent:
        address = f"unix:@braid-ends-{id(self)}-{next(NUMBERS)}"
        options = RpcOptions(allowed_modules=["test_rpc_ends"])
        agent = join(self.store, name, rank, None, options, secret=SECRET, address=address)
        self.agents.append(agent)
        return agent


@contextlib.contextmanager
def coming_and_going() -> Iterator[Nodes]:
    nodes = Nodes()
    try:
        yield nodes
    finally:
        for agent in nodes.agents:
            agent.close()


@rpc.idempotent
def lookup(key: int) -> int:
    BEGUN.append("lookup")
    return key * key


@rpc.idempotent
def hold(name: str) -> str:
    return wait_for_release(name)


def count(key: int) -> int:
    BEGUN.append("count")
    return key


def test_nodes_come_and_leave_while_others_call():
    with coming_and_going() as nodes:
        first = nodes.come("first", 0)
        with acting_for(first):
            with pytest.raises(
                RpcError, match=r"node 'second' does not exist: choose one of first"
            ):
                rpc.rpc_sync("second", count, (1,))
            second = nodes.come("second", 1)
            assert rpc.rpc_sync("second", count, (1,)) == 1
            with pytest.raises(Exception, match=r"'second' is not unique: node 1 .* node 7"):
                nodes.come("second", 7)
            leave(second)
            until(lambda: 1 in first.peers.lost)
            with pytest.raises((RpcError, PeerLostError)):
                rpc.rpc_sync("second", count, (2,))
            third = nodes.come("second", 2)  # the name is free again
            assert rpc.rpc_sync("second", count, (3,)) == 3
            leave(third)
        leave(first)
        assert BEGUN == ["count", "count"]


def test_calls_that_may_be_repeated_wait_for_the_node_to_come_back():
    with coming_and_going() as nodes:
        first, second = nodes.come("first", 0), nodes.come("second", 1)
        with acting_for(first):
            assert rpc.rpc_sync("second", lookup, (3,)) == 9
            leave(second)
            until(lambda: 1 in first.peers.lost)
            future = rpc.rpc_async("second", lookup, (5,), timeout=20)
            assert not future.done()
            nodes.come("second", 2)
            assert future.wait() == 25
            assert rpc.rpc_sync("second", lookup, (6,)) == 36
            with pytest.raises(PeerLostError, match="nobody"):
                rpc.rpc_sync("nobody", lookup, (5,), timeout=0.4)
            waiting = rpc.rpc_async("nobody", lookup, (5,))
            first.close()
            with pytest.raises(StaleError, match="was shut down before an answer came"):
                waiting.wait()
    with pytest.raises(ConfigError, match="cannot be marked as idempotent"):
        rpc.idempotent(len)


def test_a_mistake_in_a_call_that_may_be_repeated_is_an_error_at_once():
    with coming_and_going() as nodes:
        nodes.come("second", 1)
        with acting_for(nodes.come("first", 0)):
            with pytest.raises(RpcError, match="cannot be sent"):
                rpc.rpc_sync("second", lookup, (threading.Lock(),))
            future = rpc.rpc_async("second", hold, ("held",))
            until(lambda: BEGUN == ["held"])
            assert future.cancel()
            with pytest.raises(CancelledError):
                future.wait()
            RELEASED.set()


def test_a_call_that_is_sent_again_belongs_to_whoever_made_it():
    with coming_and_going() as nodes:
        first = nodes.come("first", 0)
        with acting_for(first):
            waiting = rpc.rpc_async("second", hold, ("held",), timeout=20)
        first._pool.tick = lambda: None
        other = Scope(first.peers.now_ns() + 20 * 10**9)  # of a call that has nothing to do with it
        nodes.come("second", 1)

        def send_what_is_due() -> None:
            enter(other)
            until(lambda: not len(first.caller._retries) or first.caller.tick())

        contextvars.copy_context().run(send_what_is_due)
        until(lambda: BEGUN == ["held"])
        assert not other.calls
        RELEASED.set()
        assert waiting.wait() == "held"


def test_an_earlier_life_of_a_node_does_not_disturb_the_next_one():
    with coming_and_going() as nodes:
        second = nodes.come("second", 1)
        first = nodes.come("first", 0)
        with acting_for(first), rpc.dist_autograd.context() as context:
            rpc.rpc_async("second", wait_for_release, ("old",))
            until(lambda: BEGUN == ["old"])
            first.directory.remove_own(first.info)
            first.close()
        until(lambda: 0 in second.peers.lost and not second.contexts.numbers)
        with acting_for(nodes.come("first", 0)), rpc.dist_autograd.context() as again:
            assert context != again
            new = rpc.rpc_async("second", wait_for_release, ("new",))
            until(lambda: BEGUN == ["old", "new"])
            RELEASED.set()
            assert new.wait() == "new"
        assert second.wait_idle(20)


def test_a_call_that_may_not_be_repeated_fails_with_its_node():
    with first_of(2, **ALLOWED) as agents:
        future = rpc.rpc_async("w1", wait_for_release, ("once",))
        until(lambda: BEGUN == ["once"])
        RELEASED.set()
        agents[1].close()
        with contextlib.suppress(PeerLostError):
            future.wait()
        assert BEGUN == ["once"]


def test_a_shutdown_does_not_wait_for_streams_that_nobody_reads():
    with coming_and_going() as nodes:
        nodes.come("second", 1)
        with acting_for(first := nodes.come("first", 0)):
            results = rpc.stream("second", range, (1000,), window=2)
            assert next(results) == 0
            begun_s = time.monotonic()
            leave(first, timeout_s=20)
            assert time.monotonic() - begun_s < 10


def test_the_first_node_leaves_last():
    store = HashStore()
    agents: dict[int, Agent] = {}

    def come(rank: int) -> None:
        address = f"unix:@braid-ends-{id(store)}-{rank}"
        options = RpcOptions()
        agents[rank] = join(store, f"w{rank}", rank, 3, options, secret=SECRET, address=address)

    everywhere(3, come)
    is_slow, has_left = threading.Event(), threading.Event()

    class SlowStore(PrefixStore):
        """A store that one of the nodes reaches late at the end."""

        def set(self, key: str, value: bytes) -> None:
            self.be_slow(key)
            super().set(key, value)

        def add(self, key: str, n: int) -> int:
            self.be_slow(key)
            return super().add(key, n)

        @staticmethod
        def be_slow(key: str) -> None:
            if key.startswith("end/left"):
                is_slow.set()
                RELEASED.wait(20)

    for rank, kind in enumerate((PrefixStore, PrefixStore, SlowStore)):
        agents[rank].directory.store = kind("ends", store)
    with acting_for(agents[0]):
        for name in ("w1", "w2"):
            assert rpc.rpc_sync(name, torch.add, (1, 1)) == 2

    def go(rank: int) -> None:
        leave(agents[rank], timeout_s=20)
        if rank == 0:
            has_left.set()

    threads = [threading.Thread(target=go, args=(rank,)) for rank in range(3)]
    for each in threads:
        each.start()
    assert is_slow.wait(20)
    threads[1].join(20)
    assert not has_left.wait(0.3)
    RELEASED.set()
    for each in threads:
        each.join(20)
    assert has_left.is_set()
