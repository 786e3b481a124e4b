"""Whatever a function of a peer raises is an answer, and the node lives on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch

from braid import rpc
from braid.errors import CommTimeout, PeerLostError, RendezvousError, StaleError
from braid.rpc import outcomes
from rpc_nodes import first_of

ALLOWED = {"allowed_modules": ["test_rpc_errors"], "num_worker_threads": 2}
RELEASED = threading.Event()


def fail(*_: object, **__: object) -> NoReturn:
    raise ValueError("a method of an exception")


def leave(*_: object) -> NoReturn:
    raise SystemExit(3)


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def hang(*_: object) -> str:
    RELEASED.wait(30)
    return "released"


def once(then: Callable[..., Any]) -> Callable[..., None]:
    """Return a constructor that works in the callee, where it has two arguments."""

    def init(self: Exception, *args: object) -> None:
        if len(args) != 2:
            then(self)
        Exception.__init__(self, "made of two")

    return init


NASTY: dict[str, Callable[[], BaseException]] = {}
TYPES: dict[str, type[BaseException]] = {}


def nasty(name: str, kind: type[BaseException], *args: object) -> None:
    """Add an exception of a class of this module."""
    NASTY[name] = lambda: kind(*args)
    TYPES[name] = kind


def made(name: str, *args: object, base: type = Exception, **names: Any) -> None:
    """Add an exception of a new class."""
    kind = type(f"Nasty{len(TYPES)}", (base,), {**names, "__module__": __name__})
    globals().setdefault(kind.__name__, kind)
    nasty(name, kind, *(args or ("text",)))


class Two(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


class Keyword(Exception):
    def __init__(self, *, code: int = 1) -> None:
        super().__init__()
        self.code = code


class Hostile(type):
    @property
    def __module__(cls) -> str:
        raise ValueError("a module")


class OfHostile(Exception, metaclass=Hostile):
    pass


class Inherited(Exception):
    def __init_subclass__(cls) -> None:
        fail()


class OwnNew(Exception):
    def __new__(cls, *args: object) -> OwnNew:
        if args != ("own",):
            hang()
        return super().__new__(cls, *args)


class Value:
    __repr__ = __str__ = fail


made("its str raises", __str__=fail)
made("its repr raises", __repr__=fail)
made("both raise", __str__=fail, __repr__=fail)
made("its str is a number", __str__=lambda _: 3)
made("its repr is None", __repr__=lambda _: None)
made("its str hangs", __str__=hang)
made("its repr hangs", __repr__=hang)
made("its str exits", __str__=leave)
made("its repr exits", __repr__=leave)
made("its str interrupts", __str__=interrupt)
made("its traceback raises", __traceback__=property(fail))
made("its traceback hangs", __traceback__=property(hang))
made("its with_traceback raises", with_traceback=fail)
made("its cause raises", __cause__=property(fail))
made("its notes raise", __notes__=property(fail))
made("its notes are a number", __notes__=7)
made("its args raise", args=property(fail))
made("its reduce exits", __reduce__=leave, __reduce_ex__=leave)
made("its copy hangs", __copy__=hang, __deepcopy__=hang)
made("its eq and hash raise", __eq__=fail, __hash__=fail)
made("its bool raises", __bool__=fail)
made("its dict raises", __dict__=property(fail))
made("its class raises", __class__=property(fail))
made("its constructor raises", 1, 2, __init__=once(fail))
made("its constructor exits", 1, 2, __init__=once(leave))
made("its constructor hangs", 1, 2, __init__=once(hang))
made("it is an OSError with a constructor", 1, 2, base=OSError, __init__=once(fail))
nasty("two arguments", Two, 7, "reason")
nasty("a keyword", Keyword)
nasty("half a surrogate pair", ValueError, "cannot read caf\udce9.txt")
nasty("a zero byte", ValueError, "a\0b")
nasty("a long text", ValueError, "é" * 10_000_000)
nasty("an argument that shows nothing", ValueError, Value())
nasty("five arguments", UnicodeDecodeError, "utf-8", b"\xff", 0, 1, "invalid start byte")
nasty("an errno", FileNotFoundError, 2, "No such file", "x\udcff")
nasty("a key", KeyError, "key")
nasty("the end of an iterator", StopIteration, 3)
nasty("an error of torch", torch.cuda.OutOfMemoryError, "no memory")
nasty("an error of braid", PeerLostError, "lost")
OF_OTHER_TYPE: dict[str, Callable[[], BaseException]] = {  # each arrives as a RuntimeError
    "an exit": lambda: SystemExit(3),
    "an interrupt": KeyboardInterrupt,
    "the end of a generator": GeneratorExit,
    "a base exception": lambda: BaseException("base"),
    "a class in a function": lambda: type("Local", (Exception,), {})("local"),
    "a module that is a number": lambda: type("Own", (Exception,), {"__module__": 7})("own"),
    "a class of a metaclass": lambda: OfHostile("text"),
    "a class that judges subclasses": lambda: Inherited("text"),
    "a __new__": lambda: OwnNew("own"),
}
NASTY |= OF_OTHER_TYPE
GROUP = getattr(__builtins__, "ExceptionGroup", None) or dict(vars(__import__("builtins"))).get(
    "ExceptionGroup"
)
if GROUP is not None:  # since Python 3.11
    OF_OTHER_TYPE["a group"] = NASTY["a group"] = lambda: GROUP("both", [ValueError(1)])


def raise_it(name: str) -> NoReturn:
    error = NASTY[name]()
    raise error


@rpc.functions.async_execution
def raise_it_later(name: str) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_exception(NASTY[name]())  # type: ignore[arg-type]
    return future


def fine() -> int:
    return 5


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    RELEASED.clear()
    monkeypatch.setattr(outcomes, "TEXT_S", 0.05)
    yield
    RELEASED.set()
    for thread in threading.enumerate():
        if thread.name == "braid-rpc-text":
            thread.join(20)


@pytest.mark.parametrize("name", NASTY)
def test_every_exception_is_an_answer(name, messages):
    expected = TYPES.get(name, RuntimeError)
    with first_of(2, **ALLOWED) as agents:
        reference = rpc.remote("w1", raise_it, (name,))
        future = rpc.rpc_async("w1", raise_it, (name,), timeout=20)
        for call in (
            lambda: rpc.rpc_sync("w1", raise_it, (name,), timeout=20),
            future.wait,
            future.wait,
            lambda: reference.to_here(20),
        ):
            with pytest.raises(expected) as caught:
                call()
            text = BaseException.__str__(caught.value)
            assert "On w1:" in text
            assert "in raise_it" in text.replace("\\n", "\n")
            text.encode()
        assert rpc.rpc_sync("w1", fine, timeout=20) == 5
        assert all(agent.wait_idle(20) for agent in agents)  # so that a shutdown ends
    failed = "test_rpc_errors:raise_it, called by node 0, failed: On w1:"
    assert sum(failed in each for each in messages) >= 2


class OddResult:
    """A result that cannot travel, and does not say so quietly."""

    def __init__(self, way: str) -> None:
        self.way = way

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return fail() if self.way == "class" else OddResult

    def __getattr__(self, name: str) -> Any:
        if self.way == "exit":
            leave()
        if self.way == "interrupt":
            interrupt()
        raise AttributeError(name)


def odd(way: str) -> OddResult:
    return OddResult(way)


@pytest.mark.parametrize("way", ["class", "exit", "interrupt", "usual"])
def test_every_result_is_answered(way):
    with first_of(2, **ALLOWED) as agents:
        reference = rpc.remote("w1", odd, (way,))
        with pytest.raises((RuntimeError, ValueError), match="On w1:"):
            rpc.rpc_sync("w1", odd, (way,), timeout=20)
        with pytest.raises((RuntimeError, ValueError), match="On w1:"):
            reference.to_here(20)
        assert rpc.rpc_sync("w1", fine, timeout=20) == 5
        assert all(agent.wait_idle(20) for agent in agents)


def test_seventeen_bad_exceptions_leave_a_node_that_hears():
    with first_of(2, **ALLOWED):
        calls = [rpc.rpc_async("w1", raise_it, ("its str raises",), timeout=20) for _ in range(40)]
        for call in calls:
            with pytest.raises(TYPES["its str raises"]):
                call.wait()
        assert rpc.rpc_sync("w1", fine, timeout=20) == 5


def test_a_thread_of_the_pool_that_ends_is_replaced(monkeypatch):
    with first_of(2, **ALLOWED) as agents:
        run, pool = agents[1].callee.run, agents[1]._pool

        def break_down(*args: object) -> None:
            monkeypatch.setattr(agents[1].callee, "run", run)
            raise SystemError("not a mistake of a program")

        monkeypatch.setattr(agents[1].callee, "run", break_down)
        lost = rpc.rpc_async("w1", fine, timeout=0.2)
        with pytest.raises(TimeoutError):
            lost.wait()
        assert rpc.rpc_sync("w1", fine, timeout=20) == 5
        assert all(thread.is_alive() for thread in pool._threads)


def test_a_two_argument_exception_keeps_its_type_and_the_traceback():
    with first_of(2, **ALLOWED):
        with pytest.raises(Two, match="On w1:") as caught:
            rpc.rpc_sync("w1", raise_it, ("two arguments",))
        assert "raise error" in str(caught.value)
        assert "code 7" in repr(caught.value)


def test_a_call_of_a_lost_node_does_not_try_again_until_a_deadline(monkeypatch):
    with first_of(2, **ALLOWED) as agents:
        assert rpc.rpc_sync("w1", fine, timeout=20) == 5
        agents[1].close()
        with pytest.raises(PeerLostError):
            rpc.rpc_sync("w1", fine, timeout=20)
        tried = []
        monkeypatch.setattr(agents[0]._van, "connect", lambda *_, **__: tried.append(1))
        for _ in range(3):
            with pytest.raises(PeerLostError, match="w1 is lost, and cannot be called again"):
                rpc.rpc_async("w1", fine, timeout=20).wait()
        assert tried == []


@pytest.mark.parametrize("is_lost", [True, False])
def test_calls_of_a_node_out_of_reach_do_not_each_wait_for_it(monkeypatch, is_lost):
    tried: list[float] = []
    now_ns = [0]

    def black_hole(addresses: dict[int, str], *_: object, timeout_s: float) -> dict[int, str]:
        tried.append(timeout_s)
        return dict.fromkeys(addresses, "timed out")

    def connect(_node: str, _address: str, *, timeout_s: float) -> None:
        tried.append(timeout_s)
        msg = "timed out"
        raise RendezvousError(msg)

    monkeypatch.setattr("braid.rpc.peers.probe", black_hole)
    with first_of(2, **ALLOWED) as agents, monkeypatch.context() as patched:
        patched.setattr(agents[0]._van, "connect", connect)
        patched.setattr(agents[0].peers, "now_ns", lambda: now_ns[0])
        if is_lost:
            agents[0].peers.lost.add(1)
        for now_ns[0] in (0, 0, 10**9, 3 * 10**9, 3 * 10**9):
            with pytest.raises(
                (PeerLostError, RendezvousError),
                match=r"(cannot be reached|cannot be called again): timed out",
            ):
                rpc.rpc_async("w1", fine, timeout=20).wait()
        assert tried == ([0.5, 0.5] if is_lost else [10.0, 0.5])
        agents[0].peers.lost.clear()


def test_a_reference_of_an_ended_node_says_what_to_do():
    with first_of(2, **ALLOWED) as agents:
        there, here = rpc.remote("w1", fine), rpc.remote("w0", fine)
        assert (there.to_here(), here.to_here()) == (5, 5)
        agents[0].close()
        for use in (there.to_here, there.rpc_sync().bit_length, lambda: rpc.rpc_sync("w1", fine)):
            with pytest.raises(StaleError) as caught:
                use()
            assert str(caught.value) == (
                "rpc.shutdown() has ended node w0, so its references are invalid: use "
                "them before, or call rpc.init_rpc() and make new ones"
            )


def test_a_late_answer_names_the_threads_of_a_node():
    with first_of(2, **ALLOWED):
        with pytest.raises(CommTimeout, match=r"RpcOptions\(num_worker_threads=\)"):
            rpc.rpc_sync("w1", hang, timeout=0.01)
        RELEASED.set()
