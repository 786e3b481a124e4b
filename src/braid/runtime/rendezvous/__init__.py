"""Makes a process a rank of its job: reads the launcher's environment and connects to all ranks."""

from __future__ import annotations

from braid.runtime.rendezvous.control import (
    DISMISSED,
    ControlClient,
    Exiting,
    FromLauncher,
    FromRank,
    Left,
    Loaded,
    Logged,
    NewEpoch,
    PauseTraining,
    RankFailed,
    RankHello,
    RankLost,
    Ready,
    Resumable,
    Saved,
    Stop,
)
from braid.runtime.rendezvous.environment import JobEnvironment, wants_frame_codes, wants_portable

__all__ = [
    "DISMISSED",
    "ControlClient",
    "Exiting",
    "FromLauncher",
    "FromRank",
    "JobEnvironment",
    "Left",
    "Loaded",
    "Logged",
    "NewEpoch",
    "PauseTraining",
    "RankFailed",
    "RankHello",
    "RankLost",
    "Ready",
    "Resumable",
    "Saved",
    "Stop",
    "wants_frame_codes",
    "wants_portable",
]
