"""Random programs of calls over two to four nodes have the values and gradients of local ones.

A program is a tree: its leaves are parameters of the first node, each inner node says where and how
its part is called.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from braid import rpc
from braid.rpc import dist_autograd
from rpc_nodes import first_of

OPTIONS = {"allowed_modules": ["test_rpc_random"]}
NUM_LEAVES = 3
UNARY = {
    "tanh": torch.tanh,
    "transpose": torch.t,
    "first_row": lambda x: x[:1].expand(3, 3),
    "detach": torch.Tensor.detach,
    "same": lambda x: x,
}
BINARY = {"add": torch.add, "times": torch.mul, "matmul": torch.matmul}
MODES = ("here", "sync", "async", "remote", "remote_method", "nested_future")


class Holder:
    """A value that lives in a node, and evaluates programs there."""

    def evaluate(self, program: Any, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        return evaluate(program, leaves)


def evaluate(program: Any, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """Evaluate a program in this node, by calls of others where it says so."""
    match program:
        case ["leaf", number]:
            return leaves[number]
        case ["op", name, *parts]:
            values = [call(part, leaves) for part in parts]
            return UNARY[name](*values) if len(values) == 1 else BINARY[name](*values)
    raise AssertionError(program)


@rpc.functions.async_execution
def evaluate_later(program: Any, leaves: Sequence[torch.Tensor]) -> torch.futures.Future:
    """Evaluate a program, and answer with a future."""
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(evaluate(program, leaves))
    return future


def call(part: Any, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """Evaluate a part as it says: here, or in a node."""
    mode, node, program = part
    args = (program, list(leaves))
    match mode:
        case "here":
            return evaluate(*args)
        case "sync":
            return rpc.rpc_sync(node, evaluate, args)
        case "async":
            return rpc.rpc_async(node, evaluate, args).wait()
        case "remote":
            return rpc.remote(node, evaluate, args).to_here()
        case "remote_method":
            return rpc.remote(node, Holder).rpc_sync().evaluate(*args)
        case "nested_future":
            return rpc.rpc_sync(node, evaluate_later, args)
    raise AssertionError(mode)


def locally(part: Any, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """Evaluate a part without calls."""
    _, _, program = part
    match program:
        case ["leaf", number]:
            return leaves[number]
        case ["op", name, *parts]:
            values = [locally(each, leaves) for each in parts]
            return UNARY[name](*values) if len(values) == 1 else BINARY[name](*values)
    raise AssertionError(program)


def programs(num_nodes: int) -> st.SearchStrategy[Any]:
    nodes = st.sampled_from([f"w{n}" for n in range(num_nodes)])

    def part(program: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.tuples(st.sampled_from(MODES), nodes, program).map(list)

    leaf = st.integers(0, NUM_LEAVES - 1).map(lambda number: ["leaf", number])

    def inner(program: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        one = st.tuples(st.just("op"), st.sampled_from(sorted(UNARY)), part(program))
        two = st.tuples(
            st.just("op"), st.sampled_from(sorted(BINARY)), part(program), part(program)
        )
        return st.one_of(one, two).map(list)

    return part(st.recursive(leaf, inner, max_leaves=6))


def drained(is_empty: Callable[[], bool]) -> bool:
    """Wait for messages that nobody waits for; calls carry along what has been collected."""
    until = time.monotonic() + 20
    while not is_empty() and time.monotonic() < until:
        for record in rpc.broadcast(["w0", "w1"], torch.add, (1, 1)):
            assert record == 2
    return is_empty()


def test_random_programs_have_the_values_and_gradients_of_local_ones():
    with first_of(4, **OPTIONS) as agents:

        @given(program=st.integers(2, 4).flatmap(programs), seed=st.integers(0, 99))
        def check(program, seed):
            generator = torch.Generator().manual_seed(seed)
            leaves = [
                torch.randn(3, 3, generator=generator).requires_grad_() for _ in range(NUM_LEAVES)
            ]
            expected = locally(program, leaves)
            with dist_autograd.context() as context:
                value = call(program, leaves)
                assert torch.equal(value, expected)
                if expected.requires_grad:
                    dist_autograd.backward(context, [value.square().sum()])
                    got = dist_autograd.get_gradients(context)
            if not expected.requires_grad:
                assert not value.requires_grad
                return
            wanted = torch.autograd.grad(expected.square().sum(), leaves, allow_unused=True)
            for leaf, gradient in zip(leaves, wanted, strict=True):
                if gradient is None:
                    assert leaf not in got or not got[leaf].any()
                else:
                    torch.testing.assert_close(got[leaf], gradient, rtol=1e-4, atol=1e-4)

        check()
        assert drained(lambda: not any(each.contexts.numbers for each in agents))


def test_nothing_lives_on_after_random_programs():
    with first_of(3, **OPTIONS) as agents:

        @given(program=programs(3))
        def check(program):
            call(program, [torch.ones(3, 3)] * NUM_LEAVES)

        check()
        gc.collect()
        assert drained(lambda: not any(any(each.references.counts()) for each in agents))
