"""Starts ranks that profile a model together, and reads what they have measured."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from braid.errors import ConfigError
from braid.launch import JobSpec, QuietConsole, Supervisor
from braid.plan.profiling import Profile, read_profile
from braid.train.profile_worker import ProfileRequest

__all__ = ["profile_together"]

WORKER = "braid.train.profile_worker"


def profile_together(
    request: ProfileRequest, num_ranks: int, *, threads: int | None = None
) -> Profile:
    """Profile a model on ranks of this host that all measure at once.

    Args:
        request: Model to measure; its file is replaced.
        num_ranks: Number of ranks.
        threads: Threads of each rank; the launcher's choice when None.

    Raises:
        ConfigError: A rank failed; the message is the launcher's error block.
    """
    with tempfile.TemporaryDirectory(prefix="braid-profile-") as place:
        out = str(Path(place) / "profile.json")
        wanted = msgspec.structs.replace(request, out=out)
        job = JobSpec(
            command=(WORKER, msgspec.json.encode(wanted).decode()),
            kind="module",
            num_ranks=num_ranks,
            threads=threads,
            log_dir=str(Path(place) / "logs"),
            hang_report_s=0.0,
        )
        outcome = Supervisor(QuietConsole()).run(job)
        if not outcome.ok:
            raise ConfigError(str(outcome))
        return read_profile(out)
