"""Starts ranks that profile a model together, and reads their profile."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from braid import __version__
from braid.errors import ConfigError
from braid.launch import spawn
from braid.plan.profiling import FORMAT, Curve, Profile, read_profile
from braid.train import profile_worker, server_profile
from braid.train.device import choose_device
from braid.train.profile_request import ProfileRequest

__all__ = ["cached_profile", "profile_together"]

HOUR_S = 3600.0


def profile_together(request: ProfileRequest) -> Profile:
    """Profile a model on ranks of this host that measure at the same time.

    Raises:
        ConfigError: A rank failed; the message is the launcher's error block.
    """
    assert request.num_ranks is not None, "the request has a number of ranks"
    with tempfile.TemporaryDirectory(prefix="braid-profile-") as place:
        out = Path(place, "profile.json")
        _measure(profile_worker.main, request, request.num_ranks, out)
        profile = read_profile(out)
        if not request.servers or profile.host is None:
            return profile
        out = Path(place, "servers.json")
        _measure(server_profile.main, request, 2 * request.num_ranks + 1, out)
        curve = msgspec.json.decode(out.read_bytes(), type=Curve)
        collectives = {**profile.host.collectives, f"push_pull/{request.num_ranks}": curve}
        host = msgspec.structs.replace(profile.host, collectives=collectives)
        return msgspec.structs.replace(profile, host=host)


def _measure(
    worker: Callable[[ProfileRequest], None], request: ProfileRequest, num_ranks: int, out: Path
) -> None:
    """Run ranks that measure and write to `out`, and wait until they end."""
    log_dir = str(out.parent / worker.__module__)
    request, threads = replace(request, out=str(out)), request.threads
    outcome = spawn(
        worker, num_ranks, (request,), threads=threads, log_dir=log_dir, hang_report_s=0.0
    )
    if not outcome.ok:
        raise ConfigError(str(outcome))


def cached_profile(request: ProfileRequest) -> tuple[Profile, str]:
    """Return a profile from the cache, or measure one and cache it.

    Profiles are cached by model, sizes, ranks, threads, torch, processor and GPU, in the user's
    cache directory (`XDG_CACHE_HOME`, else ~/.cache). The user's models may change, so their
    profiles are not cached.

    Returns:
        The profile, and a note that names the cache file; an empty note if it was measured.
    """
    device = choose_device(request.device).name
    facts = (request, FORMAT, __version__, torch.__version__, _processor(), device)
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    file = Path(cache, "braid", "profiles", f"{name}.json")
    if not request.target and file.is_file():
        hours = (time.time() - file.stat().st_mtime) / HOUR_S
        return read_profile(file), f"profile of {hours:.1f} h ago: {file} (remove it to measure)"
    profile = profile_together(request)
    if not request.target:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            profile.write(file)
        except OSError:  # train without a cache if it cannot be written
            return profile, ""
    return profile, ""


def _processor() -> str:
    """Return the processor's model from /proc/cpuinfo; empty if it is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("model name")), "")
