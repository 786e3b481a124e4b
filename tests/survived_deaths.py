"""Every death that a run survives, with every later end of that run: what the verdict must be.

A rank that reports an exception, or `sys.exit`, is not survived, in any role: such an error would
come again with the next rank. So `raise` and `exit` with a report are no first deaths here
(`test_an_exception_of_an_expendable_rank_fails_the_run`).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from braid.cli.commands.roles import Roles

ROLES = {
    "server": (Roles(servers=2, workers=2, replicas=1), 1),  # and the rank that dies first
    "worker": (Roles(servers=1, workers=2, on_worker_loss="shrink"), 2),
    "spare": (Roles(servers=1, workers=2, spares=1), 4),
    "expendable": (Roles(role=("actor:2", "learner:2"), expendable_role=("actor",)), 0),
}
FIRST = ("kill", "exit", "stop")
LATER = {  # kind of the verdict and exit code
    "raise": ("exception", 1),
    "exit": ("exit", 3),
    "kill": ("signal", 137),
    "timeout": ("timeout", 124),
    "SIGTERM": ("interrupted", 143),
}


class Story(NamedTuple):
    """A death that a run survives, and the fault that ends the run later."""

    role: str
    first: str
    later: str

    @property
    def expendable(self) -> frozenset[int]:
        """Ranks without which the run goes on."""
        return ROLES[self.role][0].expendable

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return ROLES[self.role][0].num_ranks(None) or 1

    @property
    def victim(self) -> int:
        """Rank that dies first."""
        return ROLES[self.role][1]

    @property
    def culprit(self) -> int:
        """Rank that fails later; the last one that no run can do without."""
        return max(set(range(self.num_ranks)) - self.expendable)

    @property
    def verdict(self) -> tuple[str, list[int], bool, int]:
        """Kind, causing ranks, certainty and exit code that are right."""
        kind, code = LATER[self.later]
        return kind, [] if self.later in {"timeout", "SIGTERM"} else [self.culprit], True, code


STORIES = [Story(*each) for each in itertools.product(ROLES, FIRST, LATER)]
