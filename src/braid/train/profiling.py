"""Starts ranks that profile a model together, and reads what they have measured."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from braid import __version__
from braid.errors import ConfigError
from braid.launch import spawn
from braid.plan.profiling import Curve, Profile, read_profile
from braid.train import profile_worker, server_profile
from braid.train.device import choose_device
from braid.train.profile_worker import ProfileRequest
from braid.train.server_profile import ServerRequest

__all__ = ["cached_profile", "profile_together"]

HOUR_S = 3600.0


def profile_together(
    request: ProfileRequest,
    num_ranks: int,
    *,
    threads: int | None = None,
    servers: bool = False,
) -> Profile:
    """Profile a model on ranks of this host that all measure at once.

    Args:
        request: Model to measure; its file is replaced.
        num_ranks: Number of ranks.
        threads: Threads of each rank; the launcher's choice when None.
        servers: Whether a parameter server is measured, too, with as many servers as workers.

    Raises:
        ConfigError: A rank failed; the message is the launcher's error block.
    """
    with tempfile.TemporaryDirectory(prefix="braid-profile-") as place:
        out = str(Path(place) / "profile.json")
        _measure(
            profile_worker.main,
            msgspec.structs.replace(request, out=out),
            num_ranks,
            place,
            threads,
        )
        profile = read_profile(out)
        if not servers or num_ranks == 1 or profile.host is None:
            return profile
        curve_file = str(Path(place) / "servers.json")
        wanted = msgspec.structs.replace(request, out=curve_file)
        asked = ServerRequest(profile=wanted, servers=num_ranks)
        _measure(server_profile.main, asked, 2 * num_ranks + 1, place, threads)
        curve = msgspec.json.decode(Path(curve_file).read_bytes(), type=Curve)
        collectives = {**profile.host.collectives, f"push_pull/{num_ranks}": curve}
        host = msgspec.structs.replace(profile.host, collectives=collectives)
        return msgspec.structs.replace(profile, host=host)


def _measure(
    worker: Callable[..., None],
    request: msgspec.Struct,
    num_ranks: int,
    place: str,
    threads: int | None,
) -> None:
    """Run ranks that measure, to their end."""
    log_dir = str(Path(place) / worker.__module__)
    outcome = spawn(
        worker, num_ranks, (request,), threads=threads, log_dir=log_dir, hang_report_s=0.0
    )
    if not outcome.ok:
        raise ConfigError(str(outcome))


def cached_profile(
    request: ProfileRequest, num_ranks: int, *, threads: int | None = None
) -> tuple[Profile, str]:
    """Return a profile that was kept from before, or measure it and keep it.

    Of the same model, sizes, ranks, threads, torch, processor and GPU, in the user's cache
    directory (`XDG_CACHE_HOME`, else ~/.cache). Models of the user's own may change and are never
    kept.

    Returns:
        The profile, and a note on where it was kept; nothing if it is new.
    """
    device = choose_device(request.device).name
    facts = (request, num_ranks, threads, __version__, torch.__version__, _processor(), device)
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    file = Path(cache, "braid", "profiles", f"{name}.json")
    if not request.target and file.is_file():
        hours = (time.time() - file.stat().st_mtime) / HOUR_S
        return read_profile(file), f"profile of {hours:.1f} h ago: {file} (remove it to measure)"
    profile = profile_together(request, num_ranks, threads=threads)
    if not request.target:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            profile.write(file)
        except OSError:  # a cache that cannot be written is no reason not to train
            return profile, ""
    return profile, ""


def _processor() -> str:
    """Return the model of the processor, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("model name")), "")
