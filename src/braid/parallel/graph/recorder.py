"""Recorder of a running model: calls of its modules, and the operations between them.

Operations inside of an atom are not recorded. A tensor that is returned unchanged (by `Identity`,
or by dropout in evaluation) is recorded as another tensor, since in other modes it is another one.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

from braid.comm.autograd.nested import flatten, map_tensors
from braid.errors import ConfigError
from braid.parallel.graph.autograd_functions import FunctionMode
from braid.parallel.graph.captured import GraphNode, Modes
from braid.parallel.graph.device_scopes import current_devices, whole_call
from braid.parallel.graph.refused import RANDOM, check_function, is_sized_by_data, line
from braid.runtime.torch_internals import storage_id, version_of

__all__ = ["Applied", "CallRecorder"]


class CallRecorder(FunctionMode):
    """Recorder of the calls of modules and functions in one run of a model.

    Args:
        model: The model.
        inputs: Tensors of the batch.

    Attributes:
        nodes: Calls so far.
        modules: Modules that were called, by name.
        tensors: Tensors that no call has returned, by number of the value.
        names: Names of the parameters and buffers among `tensors`.
        lines: Lines of the model that first used `tensors`.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.nodes: list[GraphNode] = []
        self.modules: dict[str, nn.Module] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self.names: dict[int, str] = {}
        self.lines: dict[int, str] = {}
        self._known = {id(b): name for name, b in model.named_buffers()}
        self._params = dict(model.named_parameters(remove_duplicate=False))
        self._known |= {id(p): name for name, p in self._params.items()}
        self._values: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # an id is reused once its tensor is freed
        self._sharing: dict[int, list[torch.Tensor]] = {}  # views of the same memory
        self._data: set[int] = set()  # values that depend on more than shapes
        self._unsized: set[int] = set()  # values with a shape that depends on data
        self._inside = 0
        self._modes = _modes()
        self._python_state = random.getstate()
        for x in inputs:
            self._data.add(self._new(x))

    @property
    def sees_functions(self) -> bool:
        """Whether calls are recorded; False inside of a module that is captured as one call."""
        return not self._inside

    def value_of(self, x: torch.Tensor) -> int:
        """Return the number of a value; a tensor that no call has returned gets a new number."""
        value = self._values.get(id(x))
        if value is None:
            value = self._new(x)
            self._data.add(value)
            self.tensors[value] = x
            self.lines[value] = line()
            if id(x) in self._known:
                self.names[value] = self._known[id(x)]
        return value

    def _new(self, x: torch.Tensor) -> int:
        value = len(self._alive)
        if id(x) not in self._values:
            self._sharing.setdefault(_memory_of(x), []).append(x)
        self._values[id(x)] = value
        self._alive.append(x)
        return value

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        caller = sys._getframe(1).f_code  # noqa: SLF001 - torch 2.10 makes a tensor in checkpoint()
        if self._inside or caller.co_filename == checkpoint.__file__:
            return func(*args, **kwargs)
        check_function(
            func,
            args,
            is_data=lambda x: self.value_of(x) in self._data,
            is_unsized=lambda x: self.value_of(x) in self._unsized,
        )
        return self._recorded("function", func, func, args, kwargs)

    def call_function(self, kind: type[torch.autograd.Function], args: Any, kwargs: Any) -> Any:
        """Run an autograd.Function, and record it as one call."""
        self._inside += 1
        try:
            return self._recorded("function", Applied(kind), kind.apply, args, kwargs)
        finally:
            self._inside -= 1

    def call_module(
        self, name: str, module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Return the result of `call`, and record it as one call of the submodule `name`."""
        if self._inside:
            return call(*args, **kwargs)
        self._check_python_state()
        prefix = f"{name}." if name else ""
        named_params = module.named_parameters(remove_duplicate=False)
        if not all(self._params.get(prefix + path) is param for path, param in named_params):
            msg = (
                f"{name} is called at {line()} with replaced parameters, which capture does not "
                "support: do not use functional_call"
            )
            raise ConfigError(msg)
        self.modules[name] = module
        self._inside += 1
        try:
            with whole_call(name):
                return self._recorded("module", name, call, args, kwargs)
        finally:
            self._inside -= 1
            self._python_state = random.getstate()

    def _check_python_state(self) -> None:
        if random.getstate() != self._python_state:
            msg = (
                f"the model draws Python's random numbers before {line()}, outside of its "
                "submodules, so a captured model would repeat them: draw inside a submodule, or "
                "with torch"
            )
            raise ConfigError(msg)

    def end(self, result: Any) -> tuple[Any, tuple[int, ...]]:
        """Return the structure of the model's result, and the numbers of its values."""
        self._check_python_state()
        tree, tensors = flatten(result)
        return tree, tuple(self.value_of(x) for x in tensors)

    def _recorded(
        self,
        kind: str,
        target: str | Callable[..., Any],
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        # A write in place is found by torch's version counters, since its name may not show it. The
        # tensor and all others in its memory then get new numbers: earlier calls have used the old
        # values, and later calls use the new ones, also where a cut lies between them.
        tree, used = flatten((args, kwargs))
        versions = [version_of(x) for x in used]
        result = call(*args, **kwargs)
        written = [x for x, v in zip(used, versions, strict=True) if version_of(x) != v]
        _, made = flatten(result)
        if not made and not written and kind == "function":
            return result
        inputs = tuple(self.value_of(x) for x in used)
        writes = tuple(self._written(written))
        written_ids = {id(x) for x in written}
        keeps = isinstance(target, str) or not _is_in_place(target)

        # A call may return its input, as Identity does, and Dropout in evaluation. If both had one
        # number, a replay in training would also replace the input for its other users.
        def another(x: torch.Tensor) -> torch.Tensor:
            return (
                x.view_as(x) if keeps and id(x) in self._values and id(x) not in written_ids else x
            )

        result = map_tensors(result, another)
        result_tree, made = flatten(result)
        outputs = tuple(self._values[id(x)] if id(x) in written_ids else self._new(x) for x in made)
        # Python may branch on shapes, which a replay repeats, but not on these values.
        all_made = {*outputs, *(new for _, new in writes)}
        if kind == "module" or target in RANDOM or self._data.intersection(inputs):
            self._data |= all_made
        if self._unsized.intersection(inputs) or is_sized_by_data(target, args):
            self._unsized |= all_made
        checkpointed = _is_checkpointed(self.modules.get(str(target)))
        modes = _modes_since(self._modes, checkpointed=checkpointed)
        self.nodes.append(
            GraphNode(
                kind, target, tree, inputs, result_tree, outputs,
                line(), writes, modes, checkpointed, current_devices(),
            )
        )  # fmt: skip
        return result

    def _written(self, written: Iterable[torch.Tensor]) -> Iterable[tuple[int, int]]:
        """Give new numbers to tensors that were written, and to all others in their memory."""
        shared = {id(y): y for x in written for y in [x, *self._sharing.get(_memory_of(x), ())]}
        for x in shared.values():
            old = self._values[id(x)]
            yield old, self._new(x)


@dataclass(frozen=True, slots=True)
class Applied:
    """Function that calls `apply` of an autograd.Function; equal for the same class."""

    kind: type[torch.autograd.Function]

    @property
    def __name__(self) -> str:
        """Name of the function."""
        return self.kind.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the function."""
        return self.kind.apply(*args, **kwargs)  # type: ignore[no-untyped-call]


def _memory_of(x: torch.Tensor) -> int:
    try:
        return storage_id(x.untyped_storage())
    except (RuntimeError, NotImplementedError):  # of sparse tensors
        return -id(x)


def _is_in_place(function: Callable[..., Any]) -> bool:
    name = getattr(function, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _modes() -> Modes:
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return Modes(
        torch.is_grad_enabled(),
        tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds),
    )


def _modes_since(before: Modes, *, checkpointed: bool) -> Modes:
    """Return the modes that have changed; checkpointing disables gradients itself."""
    now = _modes()
    return Modes(
        None if now.grad == before.grad or checkpointed else now.grad,
        tuple(
            new
            for old, new in zip(before.autocast, now.autocast, strict=True)
            if (old[1], old[2] if old[1] else None) != (new[1], new[2] if new[1] else None)
        ),
    )


def _is_checkpointed(module: nn.Module | None) -> bool:
    """Return whether the model calls `torch.utils.checkpoint` around the recorded call.

    A module that checkpoints itself in its `__call__` will do so in the replay as well.
    """
    frame, inside = sys._getframe(1), False  # noqa: SLF001 - the only way to find the caller
    while frame.f_back is not None and frame.f_code.co_name != "_run_recorded":
        inside |= frame.f_code.co_filename == checkpoint.__file__
        if module is not None and frame.f_locals.get("self") is module:
            inside = False
        frame = frame.f_back
    return inside
