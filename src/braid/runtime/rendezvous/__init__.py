"""Makes a process a rank of its job: reads the launcher's environment and connects to all ranks."""

from __future__ import annotations

from braid.runtime.rendezvous.control import (
    ControlClient,
    Exiting,
    Failed,
    FromLauncher,
    FromRank,
    Hello,
    Left,
    Loaded,
    Logged,
    RankLost,
    Saved,
    Stop,
)
from braid.runtime.rendezvous.environment import JobEnvironment, wants_frame_codes, wants_portable

__all__ = [
    "ControlClient",
    "Exiting",
    "Failed",
    "FromLauncher",
    "FromRank",
    "Hello",
    "JobEnvironment",
    "Left",
    "Loaded",
    "Logged",
    "RankLost",
    "Saved",
    "Stop",
    "wants_frame_codes",
    "wants_portable",
]
