"""Remote calls, references, distributed autograd and its optimizer, over sockets of one process."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import gc
import os
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from training import said_by

from braid import rpc
from braid.cli.commands.roles import Roles
from braid.cli.commands.torchrun_options import translated
from braid.errors import (
    CheckpointError,
    CommError,
    CommTimeout,
    ConfigError,
    PeerLostError,
    RendezvousError,
    StaleError,
)
from braid.rpc import dist_autograd, leader_followers, membership
from braid.rpc.current import acting_for, current_agent, set_default
from braid.rpc.membership import join
from braid.runtime.rendezvous import JobEnvironment
from braid.runtime.rendezvous.job_store import JobStore
from braid.runtime.store import HashStore
from braid.runtime.transport import Network
from example_runs import run_example
from rpc_nodes import SECRET, everywhere, first_of, nodes
from support.seeded import filled

RELEASED = threading.Event()


@pytest.fixture(autouse=True)
def _release():
    RELEASED.clear()
    yield
    RELEASED.set()


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Box:
    inside: Any


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, n: int) -> int:
        self.count += n
        return self.count

    @rpc.functions.async_execution
    def later(self, n: int) -> torch.futures.Future[int]:
        future: torch.futures.Future[int] = torch.futures.Future()
        future.set_result(self.count + n)
        return future


def same(value: Any) -> Any:
    return value


def fails(text: str) -> None:
    raise KeyError(text)


def waits() -> bool:
    """Wait until the test goes on; not for ever, since a failed test must end, too."""
    return RELEASED.wait(30)


def call_method(rref: rpc.RRef, name: str) -> Any:
    return rref.rpc_sync().__getattr__(name)(2)


def who() -> str:
    return current_agent().info.name


def calls_on(names: list[str]) -> list[str]:
    """Call the next node, which calls the next one, and so on; who ran."""
    return [who(), *(rpc.rpc_sync(names[0], calls_on, (names[1:],)) if names else [])]


@rpc.functions.async_execution
def asks_further(to: str) -> torch.futures.Future[str]:
    return rpc.rpc_async(to, who).then(lambda done: f"through {done.value()}")


@rpc.functions.async_execution
def no_future() -> int:
    return 1


def test_values_arrive_as_they_left():
    tensors = [
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(3, dtype=torch.bfloat16),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.eye(3).to_sparse(),
    ]
    values = [
        *(None, True, -5, 1 << 200, 1.5, "text", b"bytes", 2j, (1, (2,)), [1, [2]], {1, 2}),
        *({"a": 1, 2: "b"}, frozenset({3}), slice(1, None, 2), torch.float16, Colour.RED),
        *(torch.device("cpu"), torch.Size([2, 3]), Pair(1, [2]), Box(Pair(1, 2)), Counter, same),
        *(rpc.WorkerInfo("w0", 0), bytearray(b"x"), float("inf"), ()),
    ]
    with first_of(2):
        for value in values:
            back = rpc.rpc_sync("w1", same, (value,))
            assert back == value
            assert type(back) is type(value)
        for tensor in tensors:
            back = rpc.rpc_sync("w1", same, (tensor,))
            assert back.dtype == tensor.dtype
            assert back.layout == tensor.layout
            assert torch.equal(back.to_dense(), tensor.to_dense())
        leaf = torch.ones(2, requires_grad=True)
        assert rpc.rpc_sync("w1", same, (leaf,)).requires_grad
        for array in (np.arange(6).reshape(2, 3).T, np.array(1.5, ">f4"), np.float64(2.5)):
            back = rpc.rpc_sync("w1", same, (Box(array),)).inside
            assert (type(back), back.dtype) == (type(array), array.dtype)
            assert back.tolist() == array.tolist()
        layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        with dist_autograd.context():
            back = rpc.rpc_sync("w1", same, (Box(layer),)).inside
        assert str(back) == str(layer)
        for param, copy in zip(layer.parameters(), back.parameters(), strict=True):
            assert copy.is_leaf
            assert torch.equal(copy, param)


def test_functions_operators_classes_and_methods_are_called():
    with first_of(3) as agents:
        one = torch.ones(2)
        assert rpc.rpc_sync("w1", torch.add, (one, 2)).tolist() == [3, 3]
        assert rpc.rpc_sync(1, torch.Tensor.mul, (one, 4)).tolist() == [4, 4]
        assert rpc.rpc_sync("w1", torch.ops.aten.add.Tensor, (one, one)).tolist() == [2, 2]
        relu = torch.nn.functional.relu
        assert rpc.rpc_sync("w1", relu, (-one,)).tolist() == [0, 0]
        assert rpc.rpc_sync(agents[2].info, who) == "w2"
        assert rpc.rpc_sync("w0", who) == "w0", "a node may call itself"
        assert rpc.rpc_async("w1", same, kwargs={"value": 3}).wait() == 3
        assert rpc.rpc_sync("w1", calls_on, (["w2", "w0", "w1"],)) == ["w1", "w2", "w0", "w1"]
        assert rpc.rpc_sync("w1", asks_further, ("w2",)) == "through w2"
        futures = [rpc.rpc_async("w1", same, (n,)) for n in range(300)]
        assert torch.futures.wait_all(futures) == list(range(300))
        assert rpc.get_worker_info("w2") == rpc.WorkerInfo("w2", 2)
        assert rpc.get_worker_info().name == "w0"


def test_values_stay_where_they_are_made():
    with first_of(3) as agents:
        counter = rpc.remote("w1", Counter, args=(5,))
        assert counter.owner() == rpc.WorkerInfo("w1", 1)
        assert counter.rpc_sync().add(2) == 7
        assert counter.rpc_async().add(1).wait() == 8
        assert counter.remote().add(1).to_here() == 9
        assert counter.rpc_sync().later(1) == 10
        assert rpc.remote("w2", asks_further, args=("w1",)).to_here() == "through w1"
        mine = rpc.RRef([1, 2])
        assert mine.is_owner()
        assert mine.local_value() == mine.to_here() == [1, 2]
        assert rpc.rpc_sync("w1", same, (mine,)).local_value() is mine.local_value()
        passed = rpc.rpc_sync("w2", same, (counter,))
        assert passed.rpc_sync().add(0) == 9
        assert "call to_here()" in said_by(counter.local_value, ConfigError)
        assert "other nodes may not call the method __reduce_ex__" in said_by(
            lambda own=counter: rpc.rpc_sync("w1", call_method, (own, "__reduce_ex__")), ConfigError
        )
        del counter, passed, mine
        _until(lambda: all(not each.references.state.owned for each in agents), agents)


def test_a_thousand_references_leave_nothing():
    with first_of(2) as agents:
        for _ in range(10):
            made = [rpc.remote("w1", same, args=(n,)) for n in range(100)]
            assert [each.to_here() for each in made] == list(range(100))
            del made
        _until(lambda: not agents[1].references.state.owned, agents)
        _until(lambda: agents[0].references.state.is_quiet, agents)
        assert rpc.remote("w1", same, args=(0,)).to_here() == 0
        state = agents[1].references.state
        assert sum(map(len, state._over.values())) <= 2


def waits_with(rref: rpc.RRef) -> bool:
    """Return whether the caller let this end, having held a reference for the time."""
    return rref.is_owner() and waits()


def test_a_reference_goes_though_the_call_that_brought_it_home_timed_out():
    with first_of(2) as agents:
        made = rpc.remote("w1", same, args=(1,))
        assert made.to_here() == 1
        with pytest.raises(CommTimeout):
            rpc.rpc_sync("w1", waits_with, (made,), timeout=0.05)
        del made
        RELEASED.set()
        _until(lambda: not agents[1].references.state.owned, agents)
        assert agents[0].caller._brought == {}


def _until(is_over: Any, agents: list[Any]) -> None:
    gc.collect()
    begin = time.monotonic()
    while not is_over():
        for agent in agents:
            agent.references.collect()
        assert time.monotonic() - begin < 10
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("world_size", "look_s"), [(2, 60.0), (3, 0.2)], ids=["immediately", "while one is missing"]
)
def test_nodes_with_one_name_all_learn_it(monkeypatch, world_size, look_s):
    monkeypatch.setattr("braid.rpc.workers.LOOK_S", look_s)
    store, texts = HashStore(), {}

    def begin(rank: int) -> None:
        address = f"unix:@braid-test-{id(store)}-{rank}"
        began = time.monotonic()
        with pytest.raises(RendezvousError) as caught:
            join(store, "same", rank, world_size, rpc.RpcOptions(), secret=SECRET, address=address)
        assert time.monotonic() - began < 10
        texts[rank] = str(caught.value)

    everywhere(2, begin)
    assert texts.keys() == {0, 1}
    for text in texts.values():
        assert "name 'same' is not unique" in text
        assert all(f"node {n} (same)" in text for n in (0, 1))


def test_a_node_without_a_world_size_cannot_join_a_group_that_has_one(monkeypatch):
    job = JobStore(HashStore(), None, Network("", ""))
    monkeypatch.setattr(membership, "_meet", lambda _, *ranks: (job, *ranks, True))
    rpc.init_rpc("first", rank=0, world_size=1)
    first = current_agent()
    set_default(None)
    try:
        with pytest.raises(RuntimeError, match="pass world_size= on all nodes or on none"):
            rpc.init_rpc("late", rank=1)
    finally:
        set_default(first)
        rpc.shutdown()
    rpc.init_rpc("late", rank=1)
    rpc.shutdown()


def test_a_process_joins_the_nodes_though_the_lost_one_had_not_claimed_its_rank(monkeypatch):
    store = HashStore()
    first = membership._fixed_group(store, 0, contextlib.ExitStack())
    launched = JobEnvironment(rank=2, world_size=2, replaces=1)
    monkeypatch.setattr(membership, "_has_launcher", lambda: True)
    monkeypatch.setattr(JobEnvironment, "from_os", lambda: launched)
    late = membership._fixed_group(store, 1, contextlib.ExitStack())
    first.set("key", b"value")
    assert late.check(["key"])


def test_wrong_arguments_of_an_operator_are_a_runtime_error():
    with first_of(2):
        for function in (torch.add, torch.nn.functional.linear, torch.ops.aten.add.Tensor):
            with pytest.raises(RuntimeError):
                rpc.rpc_sync("w1", function, (torch.ones(1), "text", "more"))
        for function in (double, torch.split):
            with pytest.raises(TypeError):
                rpc.rpc_sync("w1", function)


def test_mistakes_are_named_and_nodes_live_on():
    with first_of(2):
        error = said_by(lambda: rpc.rpc_sync("w1", fails, ("a text",)), KeyError)
        assert "On w1:" in error
        assert "in fails" in error, "the traceback of the other node"
        assert "cannot be called by name" in said_by(
            lambda: rpc.rpc_sync("w1", lambda: 1), ConfigError
        )
        for forbidden in (os.system, subprocess.run, torch.load, eval, threading.Thread):
            text = said_by(lambda target=forbidden: rpc.rpc_sync("w1", target, ("x",)), ConfigError)
            assert "other nodes" in text
        assert "node 'w7' does not exist: choose one of w0, w1" in said_by(
            lambda: rpc.rpc_sync("w7", who), ConfigError
        )
        lock = said_by(lambda: rpc.rpc_sync("w1", same, ([1, threading.Lock()],)), ConfigError)
        assert "an argument of test_rpc:same[0][0][1] is a _thread.lock, which cannot" in lock
        assert "must return a torch.futures.Future object, got int" in said_by(
            lambda: rpc.rpc_sync("w1", no_future), RuntimeError
        )
        broken = rpc.remote("w1", fails, args=("later",))
        assert "later" in said_by(broken.to_here, KeyError)
        assert "later" in said_by(lambda: broken.rpc_sync().anything(), KeyError)
        slow = said_by(lambda: rpc.rpc_sync("w1", waits, timeout=0.2), CommTimeout)
        RELEASED.set()
        assert "w1 did not answer test_rpc:waits in time" in slow
        assert rpc.rpc_sync("w1", who) == "w1"
    assert "call init_rpc first" in said_by(who, StaleError)


class Odd(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def raises_odd() -> None:
    raise Odd(1, 2)


def returns_lock() -> Any:
    return threading.Lock()


def test_what_cannot_leave_leaves_nothing_behind():
    with first_of(2) as agents:
        kept = rpc.remote("w1", same, args=([1],))
        mine = rpc.RRef(2)
        for bad in (threading.Lock(), _endless()):
            with pytest.raises(rpc.RpcError, match=r"cannot be sent|nested too deeply"):
                rpc.rpc_sync("w1", same, ([kept, mine, bad],))
            with pytest.raises(rpc.RpcError):
                rpc.remote("w1", same, args=([kept, mine, bad],))
        assert "the result is a _thread.lock" in said_by(
            lambda: rpc.rpc_sync("w1", returns_lock), rpc.RpcError
        )
        assert "1 and 2" in said_by(lambda: rpc.rpc_sync("w1", raises_odd), Odd)
        assert rpc.rpc_sync("w1", who) == "w1"
        _until(lambda: not any(each.num_under_way for each in agents), agents)
        del kept, mine
        _until(lambda: not any(each.references.state.owned for each in agents), agents)
        _until(lambda: agents[0].references.state.is_quiet, agents)


def asks_often(times: int) -> None:
    for n in range(times):
        assert rpc.rpc_sync("w0", same, (n,)) == n
        time.sleep(5 * leader_followers.REST_S)  # so that the pool leads before the next call


def _slowly(act: Callable[..., Any]) -> Callable[..., Any]:
    def act_slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.01)
        return act(*args, **kwargs)

    return act_slowly


def test_a_thread_that_receives_learns_what_others_have_handled(monkeypatch):
    monkeypatch.setattr(leader_followers, "_TICK_S", 60.0)  # longer than this test may take
    with first_of(3) as agents:
        for each in agents[1:]:
            monkeypatch.setattr(each.codec, "unpack", _slowly(each.codec.unpack))
        asking = [rpc.rpc_async(each, asks_often, (10,), timeout=20) for each in ("w1", "w2")]
        for each in asking:
            each.wait()
        future: torch.futures.Future[int] = torch.futures.Future()
        later = threading.Timer(0.1, future.set_result, (5,))
        later.start()
        assert agents[0].wait_for(future, 30.0) == 5
        later.join()


def _endless() -> list[Any]:
    own: list[Any] = []
    own.append(own)
    return own


def test_a_lost_node_fails_what_it_was_to_answer():
    with nodes(3) as agents, acting_for(agents[0]):
        answer = rpc.rpc_async("w1", waits)
        kept = rpc.remote("w1", same, args=(1,))
        assert kept.to_here() == 1
        other = rpc.rpc_async("w2", waits)
        closer = threading.Thread(target=agents[1].close)
        closer.start()  # it waits for the call that runs
        assert "lost w1 before it answered" in said_by(answer.wait, PeerLostError)
        RELEASED.set()
        closer.join()
        assert other.wait() is True
        text = said_by(kept.to_here, CommError)
        assert "was lost: process 1" in text or "w1 is lost" in text
        began = time.monotonic()
        assert "w1 is lost" in said_by(lambda: rpc.rpc_sync("w1", same, (1,)), PeerLostError)
        assert time.monotonic() - began < 5


# -- distributed autograd


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def in_place(x: torch.Tensor) -> torch.Tensor:
    x.mul_(3)
    return x


def bounces(x: torch.Tensor, names: list[str]) -> torch.Tensor:
    """Compute something here and in other nodes, one inside the other."""
    inner = rpc.rpc_sync(names[0], bounces, (x * 2, names[1:])) if names else x
    return inner + x.sin()


def _local_bounces(x: torch.Tensor, depth: int) -> torch.Tensor:
    return (_local_bounces(x * 2, depth - 1) if depth else x) + x.sin()


def test_gradients_are_those_of_the_local_program():
    with first_of(3) as agents:
        x = torch.randn(4, requires_grad=True)
        w = torch.randn(4, requires_grad=True)

        def program(call: Any) -> torch.Tensor:
            a = call("w1", double, x * w)
            unused = call("w1", double, w)
            b = call("w2", in_place, call("w1", same, a + w))
            del unused
            return (a * b).sum() + call("w2", same, x).sum()

        with dist_autograd.context() as context:
            loss = program(lambda to, f, value: rpc.rpc_sync(to, f, (value,)))
            dist_autograd.backward(context, [loss])
            grads = dist_autograd.get_gradients(context)
        expected = torch.autograd.grad(program(lambda _, f, value: f(value.clone())), [x, w])
        assert torch.allclose(grads[x], expected[0])
        assert torch.allclose(grads[w], expected[1])
        assert x.grad is None

        with dist_autograd.context() as context:
            dist_autograd.backward(
                context, [(x + w).sum() + (rpc.rpc_sync("w1", same, (w,)) + x).sum()]
            )
            grads = dist_autograd.get_gradients(context)
            grads[x].mul_(0.5)  # as clipping does
            assert (grads[x].tolist(), grads[w].tolist()) == ([1.0] * 4, [2.0] * 4)
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [((x + w) * 3).sum()])
            grads = dist_autograd.get_gradients(context)
            grads[x].mul_(0.5)
            assert (grads[x].tolist(), grads[w].tolist()) == ([1.5] * 4, [3.0] * 4)

        for depth in range(1, 6):
            names = ["w1", "w2", "w0", "w1", "w2"][:depth]
            with dist_autograd.context() as context:
                loss = bounces(x, names).sum()
                dist_autograd.backward(context, [loss], retain_graph=True)
                first = dist_autograd.get_gradients(context)[x].clone()
                dist_autograd.backward(context, [loss])
                second = dist_autograd.get_gradients(context)[x]
            (expected_x,) = torch.autograd.grad(_local_bounces(x, depth).sum(), [x])
            assert torch.allclose(first, expected_x)
            assert torch.allclose(second, 2 * expected_x)
        assert all(not each.contexts.numbers for each in agents[:1])
        _until(lambda: not any(each.contexts.numbers for each in agents), agents)


def breaks(x: torch.Tensor) -> torch.Tensor:
    def hook(grad: torch.Tensor) -> None:
        msg = "in a hook"
        raise ValueError(msg)

    y = x * 2
    y.register_hook(hook)
    return y


def stands_still(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda _: RELEASED.wait(30) and None)
    return y


def test_a_backward_that_cannot_end_says_why():
    with first_of(3) as agents:
        x = torch.ones(2, requires_grad=True)
        assert "contexts do not nest" in said_by(_nested, ConfigError)
        with dist_autograd.context() as context:
            loss = rpc.rpc_sync("w1", breaks, (x,)).sum()
            text = said_by(lambda: dist_autograd.backward(context, [loss]), CommError)
            assert "the backward in w1 raised ValueError: in a hook" in text
        with dist_autograd.context() as context:
            loss = rpc.rpc_sync("w1", stands_still, (x,)).sum()
            text = said_by(
                lambda: dist_autograd.backward(context, [loss], timeout_s=0.3), CommTimeout
            )
            assert "did not end in 0.3 s" in text
            assert "waits for 1 answers of processes 1" in text
            RELEASED.set()
        assert "has ended" in said_by(lambda: dist_autograd.get_gradients(context), ConfigError)
        with dist_autograd.context() as context:
            bad = said_by(lambda: dist_autograd.backward(context, [torch.ones(1)]), ConfigError)
            assert "roots[0] has 1 elements and requires_grad is False" in bad
            with torch.no_grad():
                assert not rpc.rpc_sync("w1", double, (x,)).requires_grad
        assert rpc.rpc_sync("w1", who) == "w1"
        with dist_autograd.context() as context:
            loss = rpc.rpc_sync("w1", double, (x,)).sum()
            agents[1].close()
            text = said_by(lambda: dist_autograd.backward(context, [loss]), CommError)
            assert "w1" in text


def raises_while_closed(x: torch.Tensor) -> torch.Tensor:
    def hook(grad: torch.Tensor) -> None:
        if not RELEASED.is_set():
            msg = "not yet"
            raise ValueError(msg)

    y = x * 2
    y.register_hook(hook)
    return y


def test_a_backward_after_a_failed_one_has_the_whole_gradients():
    with first_of(3):
        x, bias = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        RELEASED.clear()
        with dist_autograd.context() as context:
            inner = rpc.rpc_sync("w2", double, (x + bias,))
            outer = rpc.rpc_sync("w1", raises_while_closed, (inner,))
            loss = (outer + inner + x * bias).sum()
            for _ in range(5):
                text = said_by(
                    lambda: dist_autograd.backward(context, [loss], retain_graph=True), CommError
                )
                assert "the backward in w1 raised ValueError: not yet" in text
                assert not dist_autograd.get_gradients(context)
            RELEASED.set()
            for number in (1, 2):
                dist_autograd.backward(context, [loss], retain_graph=True)
                grads = dist_autograd.get_gradients(context)
                assert grads[x].tolist() == grads[bias].tolist() == [7.0 * number] * 2


def _nested() -> None:
    with dist_autograd.context(), dist_autograd.context():
        pass


# -- the optimizer


def linear(seed: int) -> torch.nn.Linear:
    return filled(torch.nn.utils.skip_init(torch.nn.Linear, 3, 3), seed)


def references(layer: rpc.RRef) -> list[rpc.RRef]:
    return [rpc.RRef(each) for each in layer.local_value().parameters()]


@pytest.mark.parametrize(
    ("make", "settings"),
    [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.AdamW, {"lr": 0.01})],
)
def test_the_optimizer_steps_as_one_over_all_parameters(make, settings):
    with first_of(3):
        layers = [rpc.remote(f"w{n}", linear, args=(n,)) for n in (1, 2)]
        alone = torch.nn.Sequential(linear(1), linear(2))
        params = [p for each in layers for p in rpc.rpc_sync(each.owner(), references, (each,))]
        optimizer = rpc.DistributedOptimizer(make, params, **settings)
        reference = make(alone.parameters(), **settings)
        x = torch.randn(5, 3)
        for step in range(6):
            if step == 3:
                optimizer.set("lr", 0.05)
                for group in reference.param_groups:
                    group["lr"] = 0.05
                optimizer.load_state_dict(optimizer.state_dict())
            with dist_autograd.context() as context:
                out = layers[1].rpc_sync().forward(layers[0].rpc_sync().forward(x))
                dist_autograd.backward(context, [out.square().sum()])
                norm = optimizer.step(context, max_norm=1.0)
            reference.zero_grad()
            alone(x).square().sum().backward()
            expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
            reference.step()
            assert norm == pytest.approx(expected.item(), rel=1e-5)
        for mine, theirs in zip(params, alone.parameters(), strict=True):
            assert torch.allclose(mine.to_here(), theirs, atol=1e-6)
        assert "at least one" in said_by(lambda: rpc.DistributedOptimizer(make, []), ConfigError)
        text = said_by(lambda: rpc.DistributedOptimizer(make, [*params, params[0]]), ConfigError)
        assert "two references point to one parameter" in text
        with pytest.raises(TypeError, match="no_such"):
            rpc.DistributedOptimizer(make, params, no_such=1)


def trained(layers: list[rpc.RRef], optimizer: rpc.DistributedOptimizer, steps: int) -> list[float]:
    """Train, with a scheduler; return the learning rates of the groups at the end."""
    scheduler = optimizer.schedule(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    for _ in range(steps):
        with dist_autograd.context() as context:
            out = torch.ones(2, 3)
            for layer in layers:
                out = layer.rpc_sync().forward(out)
            dist_autograd.backward(context, [out.square().sum()])
            optimizer.step(context)
        scheduler.step()
    return scheduler.get_last_lr()


def groups_of(layers: list[rpc.RRef]) -> list[dict]:
    first, *rest = [rpc.rpc_sync(each.owner(), references, (each,)) for each in layers]
    return [{"params": [*first, rest[0][1]], "lr": 0.05}, {"params": [rest[0][0]]}]


def test_schedulers_and_checkpoints_know_no_nodes(tmp_path):
    """Layers of two nodes go on in one, with the same bits."""
    with first_of(3):
        layers = [rpc.remote(f"w{n}", linear, args=(n,)) for n in (1, 2)]
        optimizer = rpc.DistributedOptimizer(torch.optim.AdamW, groups_of(layers), lr=0.01)
        assert trained(layers, optimizer, 3) == [0.025, 0.005]
        optimizer.save(tmp_path, 3)
        moved = [rpc.remote("w2", linear, args=(n,)) for n in (5, 6)]
        other = rpc.DistributedOptimizer(torch.optim.AdamW, groups_of(moved), lr=1.0)
        assert other.load(tmp_path) == 3
        again = [trained(layers, optimizer, 2), trained(moved, other, 2)]
        assert again[0] == again[1]
        for mine, theirs in zip(groups_of(layers), groups_of(moved), strict=True):
            for one, two in zip(mine["params"], theirs["params"], strict=True):
                assert torch.equal(one.to_here(), two.to_here())
        few = rpc.DistributedOptimizer(torch.optim.AdamW, groups_of(moved)[0]["params"])
        text = said_by(lambda: few.load(tmp_path), CheckpointError)
        assert "has 4 parameters in 2 groups, but this optimizer has 3 in 1" in text
        first, second = groups_of(moved)
        first["params"].reverse()
        turned = rpc.DistributedOptimizer(torch.optim.AdamW, [first, second])
        before = [each.to_here().clone() for each in first["params"]]
        text = said_by(lambda: turned.load(tmp_path), CheckpointError)
        assert "parameter 0 has shape" in text
        assert all(map(torch.equal, before, [each.to_here() for each in first["params"]]))


@pytest.mark.proof
def test_the_example_has_the_gradients_of_one_process(tmp_path):
    shown = run_example("rpc_two_workers.py", tmp_path / "run", "-n", "2")
    assert "gradients equal one process: True" in shown


def test_roles_are_those_of_the_launcher():
    environ = {"BRAID_ROLES": "ps:1,trainer:2", "RANK": "2"}
    assert rpc.own_role(environ) == rpc.Role("trainer", 1, 2)
    assert rpc.own_role(environ).node == "trainer:1"
    assert rpc.names_of("trainer", environ) == ["trainer:0", "trainer:1"]
    assert "unknown role 'actor'" in said_by(lambda: rpc.names_of("actor", environ), ConfigError)
    assert "--role NAME:COUNT" in said_by(lambda: rpc.own_role({}), ConfigError)
    roles = Roles(role=("ps:1", "trainer:2"))
    assert roles.num_ranks(None) == 3
    assert roles.environ({})["BRAID_ROLES"] == "ps:1,trainer:2"
    for wrong in ("ps", "ps:0", ":1", "ps:x"):
        assert "as in --role ps:1" in said_by(
            lambda own=wrong: Roles(role=(own,)).num_ranks(None), ConfigError
        )
    assert "--role already sets the number of ranks, 3" in said_by(
        lambda: roles.num_ranks(4), ConfigError
    )
    assert translated(["--role", "a:1", "-n", "3", "--role=b:2", "x.py"]) == [
        *("--role", "a:1", "--role", "b:2", "-n", "3", "x.py")
    ]


# -- ways of serving


@rpc.batch(max_size=4, max_wait_s=0.1)
def squares(numbers: list[int]) -> list[tuple[int, int]]:
    return [(each * each, len(numbers)) for each in numbers]


@rpc.batch(max_size=2, max_wait_s=5.0)
def miscounts(numbers: list[int]) -> list[int]:
    return numbers[:1]


class Policy:
    @rpc.batch(max_size=2, max_wait_s=0.05)
    def act(self, states: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(torch.stack(states).sum(1))


@rpc.serial
class Ledger:
    def __init__(self) -> None:
        self.total = 0

    def add(self, n: int) -> int:
        known = self.total
        time.sleep(0.001)
        self.total = known + n
        return self.total


def slow_inside(to: str) -> str:
    """Call something that takes longer than the caller of this waits."""
    return rpc.rpc_sync(to, waits)


def test_calls_are_answered_in_batches():
    with first_of(2):
        futures = [rpc.rpc_async("w1", squares, (n,)) for n in range(10)]
        results = [each.wait() for each in futures]
        assert [square for square, _ in results] == [n * n for n in range(10)]
        assert max(size for _, size in results) == 4
        assert sorted(size for _, size in results)[:2] == [2, 2], "the last ones, when time is up"
        pair = [rpc.rpc_async("w1", miscounts, (n,)) for n in range(2)]
        for each in pair:
            assert "for a batch of 2 calls, but returned 1" in said_by(each.wait, ConfigError)
        policy = rpc.remote("w1", Policy)
        answers = [policy.rpc_async().act(torch.full((3,), float(n))) for n in range(3)]
        assert [each.wait().item() for each in answers] == [0, 3, 6]
        assert "a max_size of at least 1" in said_by(lambda: rpc.batch(0, 1.0), ConfigError)


def test_serial_objects_lose_no_update():
    with first_of(2):
        ledger = rpc.remote("w1", Ledger)
        answers = [ledger.rpc_async().add(1) for _ in range(50)]
        assert sorted(each.wait() for each in answers) == list(range(1, 51))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_one_call_reaches_many_nodes(count):
    with first_of(count) as agents:
        names = [each.info.name for each in agents]
        assert rpc.broadcast(names, who) == names
        assert rpc.broadcast(range(count), same, ([1],)) == [[1]] * count
        assert rpc.broadcast([], who) == []
        assert "x" in said_by(lambda: rpc.broadcast(names, fails, ("x",)), KeyError)


def test_deadlines_travel():
    with first_of(3) as agents:
        assert "in time" in said_by(
            lambda: rpc.rpc_sync("w1", slow_inside, ("w2",), timeout=0.3), CommTimeout
        )
        _until(lambda: not agents[1].num_under_way, [])
        assert agents[2].callee.num_running == 1, "the call inside has ended before its function"
        RELEASED.set()


def test_a_shutdown_does_not_wait_for_nodes_that_died():
    with nodes(3) as agents:
        agents[2].close()  # nobody was connected to it
        begin = time.monotonic()
    assert time.monotonic() - begin < 15


@pytest.mark.proof
def test_a_batched_parameter_server_outlives_a_trainer(tmp_path):
    roles = ("--role", "ps:1", "--role", "trainer:3")
    shown = run_example("rpc_batched_parameter_server.py", tmp_path / "run", *roles)
    assert "goes on without trainer:2" in shown
    assert "150 gradients, none lost; trainers at the end: 2" in shown
    right = float(shown.partition("after 60 steps ")[2].partition("%")[0])
    assert right > 85


@pytest.mark.proof
def test_a_language_model_in_two_processes_learns(tmp_path):
    roles = ("--role", "trainer:1", "--role", "ps:1")
    shown = run_example("rpc_lstm.py", tmp_path / "run", *roles)
    first, last = (float(each.split()[0]) for each in shown.split("loss ")[1:3])
    assert first > 4.4
    assert last < 2.5


KEPT: dict[str, torch.Tensor] = {}


def keeps(x: torch.Tensor) -> float:
    KEPT["state"] = x * 1.0  # with the graph of this context
    return float(x.sum().detach())


def uses_kept(x: torch.Tensor, last: bool) -> torch.Tensor:
    kept = KEPT["state"]
    return (x * kept).sum() if last else (kept * x).sum()


@pytest.mark.parametrize("last", [False, True])
def test_a_graph_with_tensors_of_another_context_gets_its_gradients(last):
    with first_of(2):
        with dist_autograd.context():
            rpc.rpc_sync("w1", keeps, (torch.ones(3, requires_grad=True),))
        x = torch.full((3,), 2.0, requires_grad=True)
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [rpc.rpc_sync("w1", uses_kept, (x, last))])
            assert dist_autograd.get_gradients(context)[x].tolist() == [1.0] * 3
