"""Two processes that call each other, with braid and with torch, for `rpc`.

    rank 0   caller: measures
    rank 1   callee

Both systems have the same names, so the same code measures both. torch's RPC polls without pause
while it is active, and cannot start again in a process with remaining references. So each round has
new processes, in which braid is measured first.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import autograd as torch_autograd
from torch.distributed import rpc as torch_rpc
from torch.distributed.optim import DistributedOptimizer as TorchOptimizer

from benchmarks.workers.ps_plan import Measured
from benchmarks.workers.rpc_plan import BRAID, BYTES, OBSERVERS, PARTS, TORCH, Plan
from braid import rpc
from braid.rpc import dist_autograd

__all__ = ["main"]


class System(NamedTuple):
    """Functions of one system.

    Attributes:
        rpc: Module of remote calls.
        autograd: Module of autograd contexts.
        optimizer: Class of the distributed optimizer.
        name: Name of the callee.
    """

    rpc: Any
    autograd: Any
    optimizer: Any
    name: str


BRAIDS = System(rpc, dist_autograd, rpc.DistributedOptimizer, "callee")
TORCHS = System(torch_rpc, torch_autograd, TorchOptimizer, "torch-callee")


def same(x: Any) -> Any:
    """Return the argument; runs in the callee."""
    return x


def parameters(layer: Any, reference: Any) -> list[Any]:
    """Return references to the parameters of a layer; runs in the callee."""
    return [reference(param) for param in layer.local_value().parameters()]


def braids_parameters(layer: Any) -> list[Any]:
    """Return braid's references to a layer's parameters; runs in the callee."""
    return parameters(layer, rpc.RRef)


def torchs_parameters(layer: Any) -> list[Any]:
    """Return torch's references to a layer's parameters; runs in the callee."""
    return parameters(layer, torch_rpc.RRef)


def second_hop(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Apply a layer of this process to an activation; runs in the callee."""
    return layer.local_value()(x)  # type: ignore[no-any-return]


class Policy:
    """Answers the observations of all observers with one forward."""

    def __init__(self, observers: int) -> None:
        self.model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
        self.lock = threading.Lock()
        self.observers = observers
        self.waiting: list[torch.Tensor] = []
        self.answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    @torch_rpc.functions.async_execution  # type: ignore[untyped-decorator]
    def act(self, state: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Return the values of all actions, once all observers have called."""
        with self.lock:
            place = len(self.waiting)
            self.waiting.append(state)
            future = self.answer.then(lambda values: values.value()[place])
            if len(self.waiting) < self.observers:
                return future
            states, answer = self.waiting, self.answer
            self.waiting, self.answer = [], torch.futures.Future()
        with torch.no_grad():
            answer.set_result(self.model(torch.stack(states)))
        return future


def serve_torch(directory: str) -> None:
    """Take part in a session of torch's RPC until the caller ends it; runs in the callee."""
    with _torch_session("torch-callee", 1, directory):
        pass


@contextlib.contextmanager
def _torch_session(name: str, rank: int, directory: str) -> Iterator[None]:
    options = torch_rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{directory}/rpc", rpc_timeout=600
    )
    torch_rpc.init_rpc(  # type: ignore[no-untyped-call]
        name, rank=rank, world_size=2, rpc_backend_options=options
    )
    try:
        yield
    finally:
        torch_rpc.shutdown()


class _Measure:
    """Measured operations of one system.

    Args:
        system: The system, which has been started.
        plan: Sizes of the measurements.
    """

    def __init__(self, system: System, plan: Plan) -> None:
        self._system, self._plan = system, plan
        self._large = {name: torch.ones(size // 4) for name, size in BYTES.items()}
        self._tiny = torch.ones(2)
        if "autograd" in plan.parts:
            self._begin_training()
        if "serving" in plan.parts:
            self._policy = system.rpc.remote(system.name, Policy, args=(OBSERVERS,))

    def seconds(self, part: str) -> float:
        """Return the seconds of one operation."""
        if part in BYTES:
            return _median_s(lambda: self._call(same, self._large[part]), 10)
        if part == "small":
            return _median_s(lambda: self._call(torch.add, self._tiny, 1), self._plan.num_small)
        if part == "windowed":
            return _median_s(self._windowed, 1)
        if part == "autograd":
            return _median_s(self._step, 20)
        return _median_s(self._observe, 1) / (OBSERVERS * self._plan.requests)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._system.rpc.rpc_sync(self._system.name, function, args=args)

    def _windowed(self) -> None:
        call = self._system.rpc.rpc_async
        futures = [
            call(self._system.name, torch.add, args=(self._tiny, 1))
            for _ in range(self._plan.window)
        ]
        torch.futures.wait_all(futures)

    def _begin_training(self) -> None:
        system = self._system
        self._layers = [system.rpc.remote(system.name, nn.Linear, args=(64, 64)) for _ in range(2)]
        collect = braids_parameters if system is BRAIDS else torchs_parameters
        params = [ref for layer in self._layers for ref in self._call(collect, layer)]
        self._optimizer = system.optimizer(torch.optim.SGD, params, lr=0.01)
        self._x = torch.randn(32, 64)

    def _step(self) -> None:
        """Run forward through both layers, each by a call, then backward, and step."""
        with self._system.autograd.context() as context:
            hidden = torch.relu(self._call(second_hop, self._layers[0], self._x))
            loss = self._call(second_hop, self._layers[1], hidden).square().mean()
            self._system.autograd.backward(context, [loss])
            self._optimizer.step(context)

    def _observe(self) -> None:
        """Run all observers, each with sequential requests."""

        def observe() -> None:
            state = torch.ones(4)
            for _ in range(self._plan.requests):
                self._policy.rpc_sync().act(state)

        threads = [threading.Thread(target=observe) for _ in range(OBSERVERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _median_s(act: Callable[[], object], count: int) -> float:
    times = []
    for number in range(count + 1):
        begin = time.perf_counter()
        act()
        if number or count == 1:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure(plan: Plan) -> list[Measured]:
    """Measure as the caller: one round."""
    seconds: dict[str, dict[str, list[float]]] = {part: {} for part in plan.parts}
    _take(_Measure(BRAIDS, plan), BRAID, seconds)
    if plan.with_torch:
        with tempfile.TemporaryDirectory(prefix="braid-bench-") as directory:
            session = rpc.rpc_async("callee", serve_torch, (directory,), timeout=0)
            with _torch_session("torch-caller", 0, directory):
                _take(_Measure(TORCHS, plan), TORCH, seconds)
            session.wait()
    amounts = {**dict.fromkeys(PARTS, 1), **{k: 2 * v for k, v in BYTES.items()}}
    return [Measured(name=part, amount=amounts[part], seconds=seconds[part]) for part in plan.parts]


def _take(measurement: _Measure, name: str, seconds: dict[str, dict[str, list[float]]]) -> None:
    for part, ways in seconds.items():
        measurement.seconds(part)  # to warm up
        ways[name] = [measurement.seconds(part)]


def main(plan: Plan) -> list[Measured] | None:
    """Run the caller or the callee; the caller returns the figures."""
    is_caller = os.environ["RANK"] == "0"
    options = rpc.RpcOptions(allowed_modules=[__name__])
    rpc.init_rpc("caller" if is_caller else "callee", rpc_backend_options=options)
    figures = measure(plan) if is_caller else None
    rpc.shutdown()
    return figures
