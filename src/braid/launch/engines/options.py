"""Options of `braid run --on ENGINE`."""

from __future__ import annotations

from dataclasses import dataclass

from braid.errors import ConfigError

__all__ = ["CLIENTS", "EngineOptions"]

CLIENTS = {
    "ray": "braid.launch.engines.ray_client",
    "slurm": "braid.launch.engines.slurm_client",
    "mpi": "braid.launch.engines.mpi_client",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Options of a run on an engine, which owns the nodes of a cluster.

    Attributes:
        engine: Name of the engine: `ray`, `slurm` or `mpi`.
        num_ranks: Number of ranks; all that the engine's own allocation has when None.
        words: Words for the engine, such as `--partition=gpu` for Slurm.
        interfaces: Names of interfaces or networks to which addresses are restricted.
        listen: Address on which the launcher's store listens; see `JobHosts`.
        environ: Names of further environment variables that ranks receive from this host.
        start_limit_s: Seconds to wait until the nodes are allocated, and again until their agents
            have joined.
    """

    engine: str
    num_ranks: int | None = None
    words: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    listen: str = ""
    environ: tuple[str, ...] = ()
    start_limit_s: float = 60.0

    def __post_init__(self) -> None:
        if self.engine not in CLIENTS:
            msg = f"--on must be one of {', '.join(CLIENTS)}, got {self.engine!r}"
            raise ConfigError(msg)
        if words := [
            word for word in self.words if word.startswith(("--num-ranks", "--max-ranks"))
        ]:
            msg = (
                "-n and --max-ranks set the number of ranks, not an option of the engine: leave "
                f"{words[0]} out"
            )
            raise ConfigError(msg)
        if self.num_ranks is not None and self.num_ranks < 1:
            msg = f"-n must be at least 1, got {self.num_ranks}"
            raise ConfigError(msg)
