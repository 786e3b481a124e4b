"""A copy of what another rank trains, kept up to date by its gradients.

Problem: a rank that alone has a part of the state takes it along when it dies. Copies of the state
after each step are three to four times as large as its gradients (Adam), old when they arrive, and
need a way back for all others.

Idea: the neighbour repeats the updates. In each step the next rank on a ring gets the gradients of
a rank's part, as they go into the optimizer, and steps a copy of the part by them. The copy has the
bits of the part after each step, and no rank ever goes back.

    rank 0   gradients of part 0 ──> rank 1   step of part 1, and of the copy of part 0

Replicas that shard a model have all gradients of their stage, so a ring of them sends nothing. All
ranks are on one ring, and send, if there are no shards, or if only this ring has each copy on
another host than its part.

Cost: memory for another part, and its update in each step; where gradients are sent, they are sent
once (a + b*l), and two messages of their size stay in memory.

Source: primary and backup as state machines: F. B. Schneider, "Implementing fault-tolerant services
using the state machine approach", ACM Computing Surveys 1990.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from braid.comm import Group
from braid.elasticity.parts import ModelPart, TensorBox, packed
from braid.errors import ConfigError
from braid.runtime.torch_internals import version_of
from braid.types import dtype_name

__all__ = ["Shadow", "crosses_hosts", "is_on_one_host", "ring_of"]

HOOKS = ("_optimizer_", "_hook_for_profile", "_zero_grad_profile_name", "_patched")


def ring_of(group: Group) -> list[int]:
    """Return the members in the order of copies; neighbours are on different hosts if possible."""
    nodes = getattr(group.engine, "nodes", None)
    if nodes is None:
        return list(range(group.size))
    return [host[i] for i in range(nodes.most) for host in nodes.hosts if i < len(host)]


def crosses_hosts(group: Group) -> bool:
    """Return whether each copy on the ring is on another host than its part."""
    nodes, ring = getattr(group.engine, "nodes", None), ring_of(group)
    pairs = zip(ring, [*ring[1:], ring[0]], strict=True)
    return nodes is not None and all(b not in nodes.local_peers(a) for a, b in pairs)


def is_on_one_host(group: Group) -> bool:
    """Return whether all members of the group are on one host."""
    nodes = getattr(group.engine, "nodes", None)
    return nodes is None or len(nodes.hosts) == 1


class Shadow:
    """Copy of the previous rank's part of the training state; making one is a collective.

    Args:
        group: The ranks of the ring, at least two.
        part: Part of this rank, which the next rank on the ring copies.
        is_sent: Whether ranks send their gradients and buffers; if not, all of `group` have them.

    Attributes:
        part: Copy of the previous rank's part.
        copied_rank: Rank of `group` with this part, if it does not send its gradients; else None.
    """

    def __init__(self, group: Group, part: ModelPart, *, is_sent: bool) -> None:
        ring = ring_of(group)
        at = ring.index(group.rank)
        self._group = group
        self._source, self._target = ring[at - 1], ring[(at + 1) % len(ring)]
        self.copied_rank = None if is_sent else self._source
        self._own = part
        names = {param: name for name, param in part.params.items()}
        groups = [
            [names[param] for param in group["params"] if param in names]
            for group in part.optimizer.param_groups
        ]
        own_buffers = part.buffers()
        specs = {name: _spec(param) for name, param in part.params.items()}
        buffers = {name: _spec(buffer) for name, buffer in own_buffers.items()}
        states, tensors = _states(part)
        mine = {
            "name": part.name,
            "groups": groups,
            "params": specs,
            "boxes": {n: [tuple(box) for box in boxes] for n, boxes in part.boxes.items()},
            "buffers": buffers,
            "states": states,
        }
        theirs = group.objects.all_gather(mine)[self._source]
        like = [*_like(theirs["params"]), *_like(theirs["buffers"])]
        like += _like(dict(enumerate(_specs_in(theirs["states"]))))
        values = self._exchange([*part.params.values(), *own_buffers.values(), *tensors], like)
        device = next(iter(part.params.values())).device if part.params else "cpu"
        params = {
            name: nn.Parameter(value.to(device), requires_grad=requires_grad)
            for (name, (_, _, requires_grad)), value in zip(
                theirs["params"].items(), values, strict=False
            )
        }
        first = len(params)
        kept = dict(zip(theirs["buffers"], values[first:], strict=False))
        optimizer = _like_optimizer(part.optimizer)
        for options, names in zip(optimizer.param_groups, theirs["groups"], strict=True):
            options["params"] = [params[name] for name in names]
        rest = iter(values[first + len(kept) :])
        for name, state in theirs["states"].items():
            optimizer.state[params[name]] = {
                key: _placed(next(rest), params[name]) if is_tensor else value
                for key, (is_tensor, value) in state.items()
            }
        boxes = {n: list(map(TensorBox.parse, plain)) for n, plain in theirs["boxes"].items()}
        copied_buffers = (lambda: kept) if is_sent else part.buffers
        self.part = ModelPart(theirs["name"], params, boxes, optimizer, copied_buffers)
        self._messages = _Messages(part, self.part) if is_sent else None
        self._grads: Mapping[str, torch.Tensor] = {}  # of the copy, by name of the parameter
        self._state = _Watch(self._own_state)
        self._own_grads: _Watch | None = None  # while a step is prepared, as they take memory
        self._own_buffers: _Watch | None = None
        part.optimizer.register_step_pre_hook(self._before_step)
        handle = part.optimizer.register_step_post_hook(self._step)
        hooks: Any = handle.hooks_dict_ref()
        hooks.move_to_end(handle.id, last=False)  # before hooks of the program

    def prepare(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Get the gradients for the next step of the copy; a collective if ranks send them.

        Args:
            grads: Gradients of the copied pieces, if ranks do not send them. Their memory must not
                change before the step.
        """
        params = self._own.params
        self._own_grads = _Watch(lambda: {name: [param.grad] for name, param in params.items()})
        buffers = self._own.buffers
        self._own_buffers = _Watch(lambda: {name: [value] for name, value in buffers().items()})
        if self._messages is None:
            copied = self.part.params
            whole = {  # of parameters that are not sharded; the optimizer may change its own
                name: param.grad.clone(memory_format=torch.contiguous_format)
                for name, param in params.items()
                if name not in grads
                and param.grad is not None
                and param.shape == copied[name].shape
            }
            self._grads = {**whole, **grads}
            return
        self._swap(self._messages.filled(), self._messages.received)
        self._grads = self._messages.grads()

    def note(self) -> None:
        """Record the versions of the parameters, at a moment when the next rank's copy is equal."""
        self._state.note()

    def check(self) -> None:
        """Raise if parameters were changed since `note`, since the next rank's copy was not.

        Raises:
            ConfigError: A parameter or its optimizer state was changed outside of a step.
        """
        if changed := self._state.changed():
            msg = (
                f"{changed}, or its state in the optimizer, was changed outside of the "
                "optimizer's step, so its copy on another rank is out of date: pass "
                "copies=False, or change it by the optimizer only"
            )
            raise ConfigError(msg)

    def check_update(self) -> None:
        """Raise if an update has changed anything outside of the optimizer's step.

        Raises:
            ConfigError: A parameter or a buffer was changed.
        """
        self.check()
        assert self._own_buffers is not None, "prepare() comes before an update"
        changed = self._own_buffers.changed()
        self._own_grads, self._own_buffers, self._grads = None, None, {}
        if changed:
            msg = (
                f"the buffer {changed} changed in the function update=, which its copy on "
                "another rank does not follow: change it in the forward, or pass copies=False"
            )
            raise ConfigError(msg)

    def _own_state(self) -> dict[str, list[object]]:
        states = self._own.optimizer.state
        return {n: [p, *states.get(p, {}).values()] for n, p in self._own.params.items()}

    def _before_step(self, *_: object) -> None:
        """Refuse a step by other gradients than the neighbour has; give the copy its options."""
        self.check()
        for options, copy in zip(
            self._own.optimizer.param_groups, self.part.optimizer.param_groups, strict=True
        ):
            copy.update({key: value for key, value in options.items() if key != "params"})
        assert self._own_grads is not None, "prepare() comes before a step"
        if changed := self._own_grads.changed():
            msg = (
                f"the gradient of {changed} changed in the function update=, after another "
                "rank had received its copy: clip with clip=, or pass copies=False"
            )
            raise ConfigError(msg)

    def _step(self, *_: object) -> None:
        """Take the step that this rank's optimizer has just taken."""
        part = self.part
        for name, param in part.params.items():
            grad = self._grads.get(name)
            param.grad = None if grad is None else grad.view(param.shape).to(param)
        part.optimizer.step()
        self.note()
        for param in part.params.values():
            param.grad = None
        if self._messages is not None:
            self._messages.write_buffers()

    def _exchange(
        self, mine: Sequence[torch.Tensor], like: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        sent, places = packed(mine)
        received, views = packed(like)
        for place, tensor in zip(places, mine, strict=True):
            place.copy_(tensor.detach())
        self._swap(sent, received)
        return views

    def _swap(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        works = [
            self._group.send(sent, self._target, async_op=True),
            self._group.recv(received, self._source, async_op=True),
        ]
        for work in works:
            work.wait()


class _Messages:
    """Memory for the messages between neighbours in a step: gradients and buffers.

    Args:
        part: Part of this rank; its gradients are sent.
        copy: Copy of another part; its gradients are received.

    Attributes:
        received: Memory of the message that is received.
    """

    def __init__(self, part: ModelPart, copy: ModelPart) -> None:
        self._own, self._copy = part, copy
        self._sent, self._sent_views = packed(_shipped(part))
        self.received, self._views = packed(_shipped(copy))

    def filled(self) -> torch.Tensor:
        """Write this rank's gradients and buffers into the message that is sent; return it."""
        present, *views = self._sent_views
        grads = [param.grad for param in self._own.params.values()]
        present.copy_(torch.tensor([grad is not None for grad in grads], dtype=torch.bool))
        for view, grad in zip(views, grads, strict=False):
            if grad is not None:
                view.copy_(grad)
        for view, buffer in zip(views[len(grads) :], self._own.buffers().values(), strict=True):
            view.copy_(buffer)
        return self._sent

    def grads(self) -> dict[str, torch.Tensor]:
        """Return the received gradients by name; views of the message."""
        present, *views = self._views
        triples = zip(self._copy.params, views, present.tolist(), strict=False)
        return {name: view for name, view, has_grad in triples if has_grad}

    def write_buffers(self) -> None:
        """Write the received buffers to the copy."""
        views = self._views[1 + len(self._copy.params) :]
        for buffer, view in zip(self._copy.buffers().values(), views, strict=True):
            buffer.copy_(view)


def _shipped(part: ModelPart) -> list[torch.Tensor]:
    """Return tensors like those that are sent in each step."""
    present = torch.zeros(len(part.params), dtype=torch.bool)
    return [present, *part.params.values(), *part.buffers().values()]


def _placed(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return a state on the device of its parameter, if it has its shape, as optimizers do."""
    return value.to(param.device) if value.shape == param.shape else value


class _Watch:
    """Finds values that were changed or replaced since `note`.

    The values are kept, since a new tensor could get the memory of a tensor that is freed.

    Args:
        read: Function that returns the values by name.
    """

    def __init__(self, read: Callable[[], Mapping[str, Sequence[object]]]) -> None:
        self._read = read
        self.note()

    def note(self) -> None:
        """Take the present values as unchanged."""
        self._values = self._read()
        self._versions = _versions(self._values)

    def changed(self) -> str | None:
        """Return the first name with other values than at `note`; None if all are equal."""
        then, now = self._versions, _versions(self._read())
        return next((n for n in {**then, **now} if then.get(n) != now.get(n)), None)


def _versions(values: Mapping[str, Sequence[object]]) -> dict[str, list[object]]:
    """Return, for each value, an object that is unequal after the value was changed."""
    return {
        name: [
            (id(value), value.data_ptr(), version_of(value))
            if isinstance(value, torch.Tensor)
            else repr(value)
            for value in of_name
        ]
        for name, of_name in values.items()
    }


def _spec(tensor: torch.Tensor) -> tuple[list[int], str, bool]:
    return list(tensor.shape), dtype_name(tensor.dtype), tensor.requires_grad


def _like(specs: Mapping[Any, Sequence[Any]]) -> list[torch.Tensor]:
    return [
        torch.empty(spec[0], dtype=getattr(torch, spec[1]), device="meta")
        for spec in specs.values()
    ]


def _states(part: ModelPart) -> tuple[dict[str, dict[str, tuple[bool, Any]]], list[torch.Tensor]]:
    """Return the optimizer's states: (whether it is a tensor, its spec or value), and tensors."""
    states: dict[str, dict[str, tuple[bool, Any]]] = {}
    tensors = []
    for name, param in part.params.items():
        if param not in part.optimizer.state:
            continue
        states[name] = {}
        for key, value in part.optimizer.state[param].items():
            is_tensor = isinstance(value, torch.Tensor)
            states[name][key] = is_tensor, _spec(value) if is_tensor else value
            tensors += [value] if is_tensor else []
    return states, tensors


def _specs_in(states: Mapping[str, Mapping[str, Sequence[Any]]]) -> list[Any]:
    return [value for state in states.values() for is_tensor, value in state.values() if is_tensor]


def _like_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same rule and options, without parameters and states."""
    kind = type(optimizer)
    if hasattr(kind, "braid_sharding"):  # a class of this one optimizer, see `sharding.attach`
        kind = kind.__bases__[1]
    attributes = {
        key: value
        for key, value in vars(optimizer).items()
        if not key.startswith(HOOKS) and key not in {"state", "param_groups", "step"}
    }
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    copy: Optimizer = kind.__new__(kind)
    copy.__setstate__({**attributes, "state": defaultdict(dict), "param_groups": groups})
    return copy
