"""The copies of the program's objects that all replicas of this process have.

Problem: between steps a program may change anything: load a state, replace a layer, set an
attribute or the learning rate. All replicas must then have the change, and no step may pay for a
copy of what has not changed.

Idea: the first replica uses the program's objects. Its state is noted after each step and compared
before the next one. A changed value is copied to the other replicas; changed modules, parameters
or hooks, or a loaded optimizer state, make new copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from braid.comm import Group
from braid.strategies.agreement import ReplicaDigests, average_buffers
from braid.strategies.made_in_scope import MadeInScope
from braid.strategies.replica_objects import ReplicaObjects
from braid.strategies.replicas import LocalReplicas

__all__ = ["ReplicaCopies"]


class ReplicaCopies:
    """Objects of all replicas of this process, equal at the beginning and end of each step.

    Args:
        made: The program's objects.
        replicas: The replicas.
        average: Called in each replica with its objects, index, group and a list; averages its
            gradients from then on, and adds hooks to the list, which are removed with the copies.

    Attributes:
        objects: Objects of each replica; empty until they are made.
    """

    def __init__(
        self,
        made: MadeInScope,
        replicas: LocalReplicas,
        average: Callable[[ReplicaObjects, int, Group, list[Any]], None],
    ) -> None:
        self._made = made
        self._replicas = replicas
        self._average = average
        self._comparison = ReplicaDigests(replicas.across)
        self._hooks: list[Any] = []
        self._is_stale = False
        self.objects: list[ReplicaObjects] = []
        # state of the first replica after the last step, to detect changes by the program
        self._shape: object = None
        self._attributes: list[Any] = []
        self._digests = torch.empty(0)
        self._buffers: dict[str, torch.Tensor] = {}

    def begin_step(self) -> None:
        """Prepare the replicas' objects for a step, and count the step."""
        self.prepare()
        self._comparison.begin_step()

    def prepare(self) -> None:
        """Make the replicas' objects, or copy the program's changes to them."""
        if self.objects:
            self.objects[0].scan()
            if self._is_stale or self._shape != (self._made.count, self.objects[0].shape()):
                self.forget()
        if not self.objects:
            self._make()
            return
        first, *others = self.objects
        has_changed = bool(others) and not torch.equal(self._digests, first.digests())
        for other in others:
            other.follow(first, self._attributes, values=has_changed)

    def end_step(self) -> None:
        """Average the changed buffers, compare the replicas, and note the first replica's state.

        Raises:
            ConfigError: Replicas differ, or a buffer has different shapes.
        """
        digests = torch.empty(0)
        for objects in self.objects:
            objects.scan()
        if self._replicas.size > 1:
            average_buffers(self.objects, self._replicas.across, self._buffers)
            digests = self._comparison.compare(self.objects)
        self._note(digests)

    def compare_processes(self) -> None:
        """Compare the replicas of all processes now, if they have been made.

        Raises:
            ConfigError: Replicas of different processes differ.
        """
        if self.objects:
            self._comparison.compare_processes(self.objects[0])

    def forget(self) -> None:
        """Remove the hooks that average gradients; the next step makes new copies."""
        for hook in self._hooks:
            hook.remove()
        for objects in self.objects if self._replicas.size > 1 else ():
            for optimizer in objects.optimizers:
                if hasattr(optimizer, "synchronize"):  # averaging has begun
                    optimizer.close()
        self.objects, self._hooks = [], []
        self._comparison.forget()

    def _make(self) -> None:
        """Make the replicas' objects: copies of the program's."""
        devices = self._replicas.devices
        self._made.check(len(devices))
        if len(devices) > 1:
            self._made.redirect()
        first = ReplicaObjects(self._made, devices[0])
        others = [ReplicaObjects(self._made, device, first) for device in devices[1:]]
        self.objects, self._is_stale = [first, *others], False
        if self._replicas.size > 1:
            self._replicas.run(
                lambda index, group: self._average(self.objects[index], index, group, self._hooks)
            )
        self._hooks += [
            optimizer.register_load_state_dict_post_hook(self._become_stale)
            for optimizer in first.optimizers
        ]
        self._note(first.digests() if others else torch.empty(0))

    def _become_stale(self, _optimizer: object) -> None:
        """Note that the program has loaded a state that is missing in the other replicas."""
        self._is_stale = True

    def _note(self, digests: torch.Tensor) -> None:
        """Note the first replica's objects, to detect changes by the program."""
        first, *others = self.objects
        self._shape = self._made.count, first.shape()
        self._attributes = first.attributes() if others else []  # else nothing is to be copied
        self._digests = digests
        self._buffers = {name: x.clone() for name, x in first.float_buffers().items()}
