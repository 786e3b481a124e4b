"""Types of the launcher's log of a run: starts and ends of ranks, epochs of members, notices.

Problem: `run.json` is complete only at the end of a run. A concurrent reader, such as `braid
status`, needs each change of a rank when it happens, and the notices are sentences for users.

Idea: the launcher appends one JSON object per line. A reader folds the lines into the current
state.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["EVENTS_FILE", "RunEvent"]

EVENTS_FILE = "events/launcher.jsonl"  # below the directory of the run


class RunEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event of a run.

    Attributes:
        unix_s: Time on the launcher's host, in seconds since 1970.
        kind: `started`, `connected` (to the launcher, from another host), `waiting` (to become a
            member), `stopped`, `continued`, `left` (the run continues without the rank, as
            planned), `finished` (exit code 0), `lost` (the run continues after the death), `failed`
            (the death ends the run), `ended` (by the launcher, or after another rank), `epoch`
            (members continue to train), or `notice`.
        rank: Rank; -1 for an epoch and a notice.
        pid: Process id of a rank that has started or connected; 0 if a started one has no id yet.
        host: Host of a started rank; empty for the launcher's host.
        text: Cause as text.
        epoch: Number of an epoch.
        members: Ranks of an epoch.
        num_steps: Number of steps after which an epoch continues.
        restarts_left: Number of processes that the run may still start for lost ranks; -1 in a run
            with fixed members.
        has_role: Whether a started rank has a role, and so never waits for an epoch.
        replaces: Lost rank that a started rank replaces in its role; -1 for none.
    """

    unix_s: float
    kind: Literal[
        "started", "connected", "waiting", "stopped", "continued", "left", "finished", "lost",
        "failed", "ended", "epoch", "notice",
    ]  # fmt: skip
    rank: int = -1
    pid: int = 0
    host: str = ""
    text: str = ""
    epoch: int = -1
    members: tuple[int, ...] = ()
    num_steps: int = -1
    restarts_left: int = -1
    has_role: bool = False
    replaces: int = -1
