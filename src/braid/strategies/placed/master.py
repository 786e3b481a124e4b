"""The master: registers the parts of a placed model with their workers, and runs steps.

    placed = strategies.placed.place(make, devices={"encoder": "/task:0", "head": "/task:1"})
    placed.optimizer(torch.optim.SGD, lr=0.1)
    for batch, target in batches:
        loss = placed.step(batch, target, loss=nn.functional.cross_entropy)

    place     capture ─▶ name devices ─▶ choose devices ─▶ host
    step      prune, split, register (first step only) ─▶ run all parts ─▶ finish

A step either succeeds in all parts or changes no parameter: the optimizers step after all parts
have run.

Source: M. Abadi et al., "TensorFlow: Large-Scale Machine Learning on Heterogeneous Distributed
Systems", 2015, section 3.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from braid.comm.autograd.nested import flatten, unflatten
from braid.errors import CommTimeout, ConfigError, PeerLostError, StaleError
from braid.parallel.graph import CapturedGraph, Situation
from braid.parallel.graph.variables import resolved
from braid.strategies.placed.loss_node import LossSpec, node_values
from braid.strategies.placed.part_step import StepRequest
from braid.strategies.placed.partition import PlacedPart
from braid.strategies.placed.pictures import (
    PlacedTimeline,
    placement_picture,
    placement_text,
    timeline_of,
)
from braid.strategies.placed.plans import (
    MOST_PLANS,
    PlanKey,
    StepPlan,
    loss_identity,
    step_plan,
)
from braid.strategies.placed.step_errors import StepErrors
from braid.strategies.placed.tasks import TaskCall, Tasks
from braid.strategies.placed.worker import RESTORE, graph_digest

__all__ = ["PlacedModel", "PlacedOptions"]


class PlacedOptions(NamedTuple):
    """Options of a placed model; see `place`.

    Attributes:
        make: Function that returns the model and its example; None for a model of this process.
        args: Arguments of `make`.
        seed: Seed of random numbers.
        timeout_s: Seconds that a step may take.
    """

    make: Callable[..., Any] | None
    args: tuple[Any, ...]
    seed: int
    timeout_s: float


class PlacedModel:
    """A model placed on devices of several tasks; returned by `place`.

    Attributes:
        devices: Device of each node of the graph, by its label.
        num_steps: Number of steps so far, which seeds the random numbers of the next step.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: CapturedGraph,
        devices: list[str],
        tasks: Tasks,
        options: PlacedOptions,
    ) -> None:
        self._placement, self._tasks, self._options = devices, tasks, options
        self._timeout_s = options.timeout_s
        self._name = f"{tasks.here}:{os.urandom(6).hex()}"
        self.devices = dict(zip(graph.labels(), devices, strict=True))
        self.num_steps = 0
        self._step = 0
        self._is_training = model.training
        self._optimizer: tuple[Any, ...] | None = None
        self._plans: dict[Any, StepPlan] = {}
        self._num_plans = 0
        self._finishing: list[TaskCall] = []
        used = {tasks.addresses[device].node for device in devices}
        self._nodes = [node for node in tasks.nodes if node in used]
        self._values = node_values(graph)
        self._frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        self._digest = graph_digest(graph)
        # modules and tensors live in the tasks from now on
        self._graph = dataclasses.replace(graph, modules={}, tensors={})
        self._host(graph)
        state = _state_of(model) | {f"value {value}": x for value, x in graph.tensors.items()}
        self._load(state)
        self._shapes = {key: x.shape for key, x in model.state_dict().items()}
        held = self._all("names")
        names = {name for tensors in held.values() for name in tensors}
        self._rest = {
            key: x for key, x in state.items() if key not in self._shapes or key not in names
        }

    def _host(self, graph: CapturedGraph) -> None:
        make, args, _, _ = self._options
        addresses = self._tasks.addresses
        remote = [node for node in self._nodes if node != self._tasks.here]
        if remote and make is None:
            msg = (
                f"parts are placed on {', '.join(remote)}, where the model does not exist: pass a "
                "function that returns the model and its example, so that each task makes it"
            )
            raise ConfigError(msg)
        if self._tasks.here in self._nodes:
            self._tasks.worker.host_local(self._name, graph, self._placement, addresses)
        host = (self._name, make, args, self._digest, self._placement, addresses)
        calls = [self._tasks.call(node, "host", *host) for node in remote]
        for call in calls:
            call.wait()

    @property
    def num_pending(self) -> int:
        """Number of values that tasks still keep for running steps; 0 between steps."""
        return sum(self._all("num_pending").values())

    # -- steps

    def optimizer(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Make an optimizer on each task for its parameters; `step` then updates them.

        Args:
            make: Class of the optimizer, such as `torch.optim.SGD`.
            args: Arguments of the optimizer after the parameters.
            kwargs: Keyword arguments of the optimizer.
        """
        self._optimizer = (make, args, kwargs)
        self._all("make_optimizer", make, args, kwargs)

    def step(self, inputs: Any, target: Any, *, loss: Callable[[Any, Any], Any]) -> torch.Tensor:
        """Run forward and backward of a batch, and a step of the optimizers if there are any.

        Without optimizers, gradients are added to the gradients of earlier steps.

        Args:
            inputs: Arguments as in the example; a tuple for several, a dict by keyword.
            target: Target of the loss.
            loss: Function (output, target) that returns a number; tasks find it by its name.

        Returns:
            The loss, without a graph.

        Raises:
            Exception: An exception of a node; its notes have the node, its line and its device.
            PeerLostError: A task is lost; the message has its devices and the step.
            StaleError: A task has restarted.

        Cost: two calls to each task, and one for each tensor or gradient sent between devices.
        """
        if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
            msg = "the loss has parameters that no task would train: make it a part of the model"
            raise ConfigError(msg)
        tree, targets = flatten(target)
        plan = self._plan(PlanKey(), LossSpec(loss, tree, len(targets)))
        feeds = {**self._inputs(inputs), **dict(zip(plan.targets, targets, strict=True))}
        fetched = self._run(plan, feeds, trains=True)
        self.num_steps += 1
        return fetched[plan.loss]

    def predict(self, inputs: Any) -> Any:
        """Return the model's output for `inputs`, in the form of the example, without gradients."""
        graph = self._graph
        feeds = self._inputs(inputs)
        plan = self._plan(PlanKey(graph.results), None)
        values = {**feeds, **self._run(plan, feeds, trains=False)}
        now = Situation(len(feeds[graph.rows_of]), self._is_training, torch.device("cpu"))
        return unflatten(resolved(graph.result_tree, now), [values[v] for v in graph.results])

    def run(
        self, fetches: Sequence[str], inputs: Any, feeds: Mapping[str, torch.Tensor] | None = None
    ) -> list[Any]:
        """Return outputs of some nodes, without gradients; only the needed nodes run.

        Args:
            fetches: Labels of nodes; see `devices`.
            inputs: Arguments of the model.
            feeds: Outputs to use for some nodes, which then do not run.

        Raises:
            ConfigError: The graph does not contain a node.
        """
        values = self._inputs(inputs)
        for label, x in (feeds or {}).items():
            outputs = self._outputs(label)
            if len(outputs) != 1:
                msg = f"{label} has {len(outputs)} outputs: feed a node with one output instead"
                raise ConfigError(msg)
            values[outputs[0]] = x
        wanted = [self._outputs(label) for label in fetches]
        needed = tuple(sorted({value for outputs in wanted for value in outputs}))
        plan = self._plan(PlanKey(needed, tuple(sorted(values))), None)
        known = {**values, **self._run(plan, values, trains=False)}
        lists = [[known[value] for value in outputs] for outputs in wanted]
        return [xs[0] if len(xs) == 1 else xs for xs in lists]

    def _outputs(self, label: str) -> tuple[int, ...]:
        labels = self._graph.labels()
        if label not in labels:
            msg = f"the graph has no node {label!r}: its nodes are {', '.join(labels)}"
            raise ConfigError(msg)
        return self._graph.nodes[labels.index(label)].outputs

    def _inputs(self, inputs: Any) -> dict[int, torch.Tensor]:
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        tree, tensors = flatten(((), inputs) if isinstance(inputs, dict) else (args, {}))
        if len(tensors) == self._graph.num_inputs and tree != self._graph.batch_tree:
            msg = f"the model was captured with inputs {self._graph.batch_tree}, got {tree}"
            raise ConfigError(f"{msg}: give the same arguments in the same order")
        if len(tensors) != self._graph.num_inputs:
            msg = f"the model needs {self._graph.num_inputs} input tensors, got {len(tensors)}"
            raise ConfigError(msg)
        if any(x.requires_grad for x in tensors):
            msg = "an input requires a gradient, which placed models do not compute: detach it"
            raise ConfigError(msg)
        return dict(enumerate(tensors))

    def _plan(self, key: PlanKey, loss: LossSpec | None) -> StepPlan:
        """Return a registered plan; prune, split and register it if it is new."""
        name = key, loss_identity(loss)
        if name in self._plans:
            return self._plans[name]
        forgotten = -1
        if len(self._plans) >= MOST_PLANS:
            forgotten = self._plans.pop(next(iter(self._plans))).number
        self._num_plans += 1
        plan = step_plan(self._num_plans, self._graph, self._values, self._placement, key, loss)
        calls = [
            self._tasks.call(
                self._node_of(part), "register", self._name, plan.number, part, loss, forgotten
            )
            for part in plan.parts
        ]
        for call in calls:
            call.wait()
        self._plans[name] = plan
        return plan

    def _run(
        self, plan: StepPlan, feeds: Mapping[int, torch.Tensor], *, trains: bool
    ) -> dict[int, torch.Tensor]:
        """Run all parts of a step, then end it everywhere; return the fetched values."""
        self._wait_finished()
        self._step += 1
        rows = len(feeds[self._graph.rows_of])
        autocast = tuple(
            (kind, torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        )
        errors, calls = StepErrors(), []
        fetched: dict[int, torch.Tensor] = {}
        here = [part for part in plan.parts if self._node_of(part) == self._tasks.here]
        others = [part for part in plan.parts if part not in here[-1:]]
        try:
            for part in (*others, *here[-1:]):
                request = StepRequest(
                    step=self._step,
                    feeds={v: feeds[v].detach() for v in part.feeds},
                    rows=rows,
                    trains=trains,
                    loss=plan.loss,
                    seed=self._options.seed,
                    draw=self.num_steps,
                    autocast=autocast,
                    timeout_s=self._timeout_s,
                )
                asked = ("run", self._name, plan.number, part.device, request)
                if part in others:
                    call = self._tasks.call(self._node_of(part), *asked, timeout_s=self._timeout_s)
                    call.when_failed(partial(self._failed, errors, call))
                else:
                    call = self._tasks.call_here(*asked)
                calls.append(call)
            for call in reversed(calls):  # the part that runs here in this thread is the last one
                try:
                    fetched.update(call.wait(self._timeout_s).fetched)
                except Exception as exc:  # noqa: BLE001 - all calls end before one error is raised
                    self._failed(errors, call, exc)
        except BaseException:  # such as KeyboardInterrupt
            self._abort("the master was interrupted")
            raise
        if errors:
            raise self._cause(errors)
        self._finish(applies=trains and self._optimizer is not None)
        return fetched

    def _finish(self, *, applies: bool) -> None:
        """End a step that all parts have run; the next call waits until other tasks have ended it.

        The program loads its next batch while the optimizers of other tasks step.
        """
        asked = ("finish", self._name, self._step, applies)
        others = [node for node in self._nodes if node != self._tasks.here]
        self._finishing = [
            self._tasks.call(task, *asked, timeout_s=self._timeout_s) for task in others
        ]
        if self._tasks.here in self._nodes:
            self._tasks.call_here(*asked).wait()

    def _wait_finished(self) -> None:
        """Wait until all tasks have ended the last step."""
        calls, self._finishing = self._finishing, []
        for call in calls:
            try:
                call.wait()
            except PeerLostError as exc:
                raise self._lost(call.node, exc) from exc

    def _node_of(self, part: PlacedPart) -> str:
        return self._tasks.addresses[part.device].node

    def _abort(self, reason: str) -> None:
        """End the step in all tasks, so that no part waits for a failed one."""
        for node in self._nodes:
            self._tasks.call(node, "abort", self._name, self._step, reason)

    def _failed(self, errors: StepErrors, call: TaskCall, error: BaseException) -> None:
        """Note the error of a call; end the step at the first one."""
        if errors.add(call, error):
            self._abort(f"{call.node} failed: {type(error).__name__}")

    def _cause(self, errors: StepErrors) -> BaseException:
        """Return the error that made a step fail."""
        call, error = errors.cause()
        if isinstance(error, PeerLostError):
            return self._lost(call.node, error)
        if isinstance(error, TimeoutError):
            msg = f"{call.node} did not run step {self._step} within {self._timeout_s:g} s: {error}"
            return CommTimeout(msg)
        return error

    def _lost(self, node: str, error: PeerLostError) -> PeerLostError:
        places = [device for device, task in self._tasks.addresses.items() if task.node == node]
        msg = (
            f"lost {node} with {', '.join(places)} in step {self._step}: {error}. The parameters "
            f"there are gone: start the task again, then {RESTORE}"
        )
        return PeerLostError(msg, rank=error.rank)

    # -- state

    def train(self, mode: bool = True) -> PlacedModel:
        """Set the model to train mode on all tasks, or to evaluation mode if `mode` is False."""
        self._is_training = mode
        self._all("set_mode", mode)
        return self

    def eval(self) -> PlacedModel:
        """Set the model to evaluation mode on all tasks."""
        return self.train(False)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the model's parameters and buffers, from all tasks, in the model's order."""
        state = self._collected("state")
        return {
            key: state[key] if key in state else self._rest[key].detach() for key in self._shapes
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load parameters and buffers, by name, on all tasks.

        Raises:
            ConfigError: Keys are missing or unknown, or a shape differs.
        """
        missing, unknown = self._shapes.keys() - state.keys(), state.keys() - self._shapes.keys()
        known = self._shapes.keys() & state.keys()
        other = [key for key in known if state[key].shape != self._shapes[key]]
        if missing or unknown or other:
            msg = (
                f"the state is of another model: missing {sorted(missing)}, unknown "
                f"{sorted(unknown)}, of another shape {sorted(other)}"
            )
            raise ConfigError(msg)
        self._rest.update({key: state[key] for key in self._rest.keys() & known})
        self._load(dict(state))

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the gradients of all parameters, by name."""
        return self._collected("gradients")

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        self._all("zero_grad")

    def optimizer_state(self) -> dict[str, Any]:
        """Return the state of each task's optimizer, by node."""
        return self._all("collect", "optimizer")

    def restore(
        self, state: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any] | None = None
    ) -> None:
        """Register all parts again after a task has restarted, and load a state everywhere.

        Args:
            state: State of `state_dict`.
            optimizer: State of `optimizer_state` at the same step; needed if an optimizer exists.
        """
        self._finishing = []
        self._tasks.meet()
        self._plans.clear()
        self._host(self._graph)
        self._load(self._rest)
        self.load_state_dict(state)
        self._all("set_mode", self._is_training)
        if self._optimizer is not None:
            self._all("make_optimizer", *self._optimizer)
            for node, of_node in (optimizer or {}).items():
                self._tasks.call(node, "load_optimizer", self._name, of_node).wait()

    def _load(self, state: dict[str, torch.Tensor]) -> None:
        self._all("load", state, self._frozen)

    def _collected(self, what: str) -> dict[str, Any]:
        parts = self._all("collect", what)
        return {key: x for part in parts.values() for key, x in part.items()}

    def _all(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a method in all tasks that have parts; return the results by node."""
        self._wait_finished()
        here, asked = self._tasks.here, (method, self._name, *args)
        others = [node for node in self._nodes if node != here]
        calls = [self._tasks.call(node, *asked, timeout_s=self._timeout_s) for node in others]
        if here in self._nodes:
            calls.insert(0, self._tasks.call_here(*asked))
        results = {}
        for call in calls:
            try:
                results[call.node] = call.wait(self._timeout_s)
            except PeerLostError as exc:
                raise self._lost(call.node, exc) from exc
        return results

    # -- pictures

    def timeline(self) -> PlacedTimeline:
        """Return the time spans of all parts' activities in the last step, on one time axis."""
        spans = self._all("collect", "spans")
        return timeline_of(spans, self._tasks.offsets_ns, list(map(str, self._tasks.devices)))

    def draw(self, path: str | Path) -> None:
        """Write the placement: a picture if the path ends with `.svg`, else text."""
        path = Path(path)
        draw = placement_picture if path.suffix == ".svg" else placement_text
        path.write_text(draw(self._graph, self._placement))

    def __str__(self) -> str:
        return placement_text(self._graph, self._placement)

    # -- end

    def close(self) -> None:
        """Wait until the last step has ended on all tasks, then drop the model. Idempotent."""
        try:
            self._wait_finished()
        finally:
            for node in self._nodes:
                with suppress(StaleError, PeerLostError):
                    self._tasks.call(node, "drop", self._name).wait(self._timeout_s)
            self._nodes = []
            self._tasks.close()

    def __enter__(self) -> PlacedModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # an error of the last step is less than the program's
            self._finishing = []
        self.close()


def _state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers under all their names, also those that are not saved."""
    named = dict(model.named_parameters(remove_duplicate=False))
    return {**named, **dict(model.named_buffers(remove_duplicate=False))}
