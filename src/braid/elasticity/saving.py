"""Checkpoints of an elastic training: its state, and how far it has come."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from braid.checkpoint.directory import CheckpointDirectory
from braid.comm import Group
from braid.elasticity.members import Members
from braid.elasticity.state_transfer import TrainingState
from braid.errors import CheckpointError, ConfigError
from braid.parallel import resume

__all__ = ["TrainingCheckpoints"]

LOG = logging.getLogger(__name__)
PROGRESS = "elastic_training"  # name of the numbers beside the state


class TrainingCheckpoints:
    """Checkpoints of a training, in a directory that all members see.

    Args:
        directory: The directory; empty for no checkpoints.
        every: Number of steps between two checkpoints.

    Attributes:
        directory: The directory.

    Raises:
        ConfigError: Only one of `directory` and `every` is given.
    """

    def __init__(self, directory: str = "", every: int = 0) -> None:
        if bool(directory) != (every > 0):
            msg = (
                f"checkpoints={directory!r} and checkpoint_every={every} belong together: pass "
                "both, a directory that all ranks share and a number of steps of at least 1"
            )
            raise ConfigError(msg)
        self.directory = directory
        self._every = every

    def __bool__(self) -> bool:
        return bool(self.directory)

    def is_due(self, num_steps: int) -> bool:
        """Return whether a checkpoint is due after `num_steps` steps."""
        return bool(self) and num_steps % self._every == 0

    def vote(self, members: Members, num_steps: int, *, is_wanted: bool, is_only: bool) -> bool:
        """Return whether all members want a checkpoint, or one needs it; a collective.

        A member needs it if it has lost the launcher, or leaves and has the only copy of its part.
        In a last epoch, save if no later step is in the directory: ranks of a living launcher, from
        which these members are cut off, may have gone further. Without a checkpoint, others take
        the state over.
        """
        needs = members.has_lost_launcher or (is_wanted and is_only)
        vote = -1 if needs else int(is_wanted)
        if members.is_last_epoch:
            steps = CheckpointDirectory(self.directory).steps()
            vote = int(not steps or steps[-1] < num_steps)
        return bool(members.group.all_reduce(torch.tensor([vote]), op="min").item())

    def save(
        self, members: Members, model: Any, state: TrainingState, progress: Mapping[str, Any]
    ) -> None:
        """Save a checkpoint; a collective. A failure is only a warning, and the training continues.

        Args:
            members: The members.
            model: Model, whole or on a mesh.
            state: Model, optimizer and other objects of the training.
            progress: Further plain values to save, such as the number of steps.
        """
        parts: dict[str, Any] = {PROGRESS: _Values(dict(progress)), **state.others}
        try:
            resume.save(
                self.directory,
                model=model,
                optimizer=state.optimizer,
                step=progress["num_steps"],
                group=members.group,
                **parts,
            )
        except CheckpointError as error:
            if not members.group.rank:
                LOG.warning("a checkpoint could not be saved: %s", error)
        else:
            members.can_resume(progress["num_steps"], is_saved=True)

    def load(self, group: Group, state: TrainingState) -> Mapping[str, Any] | None:
        """Load the last checkpoint into a whole model; a collective.

        Returns:
            The `progress` that was saved with it; None without a checkpoint.
        """
        if not self:
            return None
        values = _Values({})
        resume.load(
            self.directory,
            model=state.model,
            optimizer=state.optimizer,
            group=group,
            **{PROGRESS: values, **state.others},
        )
        return values.values or None

    def check_loaded(self, num_steps: int, members: Members) -> None:
        """Check that members without a state have begun with a checkpoint, if the run has one.

        Args:
            num_steps: Number of steps with which they have begun.
            members: The members.

        Raises:
            CheckpointError: They have found no checkpoint.
        """
        if num_steps:
            members.can_resume(num_steps, is_saved=False)
        elif members.checkpoint_step > 0:
            msg = (
                f"all ranks with the state of step {members.checkpoint_step} were lost, and no "
                f"checkpoint was found in {self.directory!r}: pass the same checkpoints= in all "
                "processes"
            )
            raise CheckpointError(msg)


class _Values:
    """Plain values as a part of a checkpoint."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state
