"""Environment variables HOROVOD_* of a rank as one frozen value, read once.

`variables` has the table of names. This module converts their values to options of the engine, and
so needs torch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from braid.compat.horovod.fusion import Autotuner, FusionOptions, StateOptions, TuneOptions
from braid.compat.horovod.variables import LEVELS, read_variables
from braid.errors import raise_all

__all__ = ["HorovodEnvironment", "write_search"]

HOROVODS_S = 0.001
UNTIL_WAITED_FOR_S = 0.25
DEFAULT = StateOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class HorovodEnvironment:
    """Values of HOROVOD_*, with Horovod's defaults.

    Attributes:
        fusion_threshold_bytes: Largest batch in bytes; 0 carries out each tensor alone. The
            engine's default when None.
        cycle_time_ms: Milliseconds for which operations are collected before they are carried out,
            if no thread waits for one. Depends on free cores (`collecting_s`) when None.
        cache_capacity: Number of operations that ranks remember; 0 for none.
        disable_group_fusion: Whether `fusion_threshold_bytes` also divides explicit groups.
        timeline: Path of the timeline; empty for none.
        timeline_mark_cycles: Whether the timeline also shows exchanges.
        stall_check: Whether to report operations that some ranks have not submitted.
        stall_check_s: Seconds until such an operation is reported.
        stall_shutdown_s: Seconds until such an operation ends the job; 0 for never.
        elastic_timeout_s: Seconds to wait for enough members of an elastic run.
        reset_limit: Number of changes of the members after which a lost member ends the run; None
            for no limit.
        hierarchical_allreduce: Whether all_reduce is hierarchical over hosts; decided by measured
            costs when None.
        hierarchical_allgather: Accepted without effect: on several hosts allgather is always
            hierarchical.
        autotune: Whether to search for the batch limit and the cycle time
            (`braid.compat.horovod.fusion.autotune`); values that are set are not searched.
        autotune_log: Path of the search's log; empty for none.
        autotune_warmup_samples: Number of first samples to discard.
        autotune_steps_per_sample: Number of steps in a sample.
        autotune_bayes_opt_max_samples: Number of samples in the search.
        autotune_gaussian_process_noise: Noise in the search.
        log_level: Level: trace, debug, info, warning, error or fatal.
        notes: Sentences for the user about unknown names.

    Raises:
        ConfigError: A number is negative, or the level is unknown.
    """

    fusion_threshold_bytes: int | None = None
    cycle_time_ms: float | None = None
    cache_capacity: int = 1024
    disable_group_fusion: bool = False
    timeline: str = ""
    timeline_mark_cycles: bool = False
    stall_check: bool = True
    stall_check_s: float = 60.0
    stall_shutdown_s: float = 0.0
    elastic_timeout_s: float = 600.0
    reset_limit: int | None = None
    hierarchical_allreduce: bool | None = None
    hierarchical_allgather: bool | None = None
    autotune: bool = False
    autotune_log: str = ""
    autotune_warmup_samples: int = 3
    autotune_steps_per_sample: int = 10
    autotune_bayes_opt_max_samples: int = 20
    autotune_gaussian_process_noise: float = 0.8
    log_level: str = "warning"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be 0 or more, got {value!r}"
            for name in self.__slots__
            if isinstance(value := getattr(self, name), (int, float)) and not value >= 0
        ]
        if self.log_level not in LEVELS:
            problems.append(f"log_level must be one of {', '.join(LEVELS)}, got {self.log_level!r}")
        raise_all(problems)

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> HorovodEnvironment:
        """Read an environment without printing anything; see `notes`.

        Args:
            environ: Environment, such as `os.environ`.

        Raises:
            ConfigError: Values cannot be read; the message names all of them.
        """
        read = read_variables(environ)
        values: dict[str, Any] = dict(read.values)
        return cls(**values, notes=read.notes)

    @classmethod
    def from_os(cls) -> HorovodEnvironment:
        """Read this process's environment; the first rank shows `notes` as warnings.

        Raises:
            ConfigError: As for `of`.
        """
        environment = cls.of(os.environ)
        if os.environ.get("RANK", "0") == "0":
            for note in environment.notes:
                warnings.warn(note, UserWarning, stacklevel=2)
        return environment

    def _search(self) -> TuneOptions:
        return TuneOptions(
            threshold=self.fusion_threshold_bytes is None,
            cycle_time=self.cycle_time_ms is None,
            warmup_samples=self.autotune_warmup_samples,
            steps_per_sample=self.autotune_steps_per_sample,
            max_samples=self.autotune_bayes_opt_max_samples,
            noise=self.autotune_gaussian_process_noise,
        )

    def options(self, *, spans_hosts: bool = False, free_cores: bool = True) -> FusionOptions:
        """Return the options of an engine.

        Args:
            spans_hosts: Whether the engine's ranks are on several hosts, so that all_reduce can be
                hierarchical.
            free_cores: Whether hosts have cores on which no rank computes.
        """
        ms, most = self.cycle_time_ms, self.fusion_threshold_bytes
        searches = self.autotune and None in {ms, most}
        by_hosts = spans_hosts and self.hierarchical_allreduce
        return FusionOptions(
            state=StateOptions(
                threshold_bytes=DEFAULT.threshold_bytes if most is None else most,
                cache_capacity=self.cache_capacity,
                split_groups=self.disable_group_fusion,
                stall_check_s=self.stall_check_s if self.stall_check else 0.0,
                stall_shutdown_s=self.stall_shutdown_s if self.stall_check else 0.0,
            ),
            cycle_time_s=collecting_s(spans_hosts, free_cores) if ms is None else ms * 1e-3,
            algorithm="hierarchical" if by_hosts else None,
            autotune=self._search() if searches else None,
        )


def write_search(path: Path, tuner: Autotuner) -> None:
    """Write the settings that a search has tried as CSV, the best last.

    Args:
        path: Path of the file.
        tuner: The search, which may be unfinished.
    """
    rows = [(*settings, score) for settings, score in tuner.samples]
    lines = ["threshold_bytes,cycle_time_ms,bytes_per_s"]
    lines += [f"{nbytes},{time_s * 1e3:g},{score:.6g}" for nbytes, time_s, score in rows]
    best = tuner.best
    lines.append(f"{best.threshold_bytes},{best.cycle_time_s * 1e3:g},best")
    path.write_text("\n".join(lines) + "\n")


def collecting_s(spans_hosts: bool, free_cores: bool) -> float:
    """Return the seconds for which operations are collected, if no thread waits for one.

    Sums in shared memory run on the cores. If all cores compute gradients, a sum that begins early
    does not end sooner, and evicts the gradients' data from the caches.

    Args:
        spans_hosts: Whether ranks communicate over a network, which works in parallel to the cores.
        free_cores: Whether there are devices, or cores on which no rank computes.
    """
    return HOROVODS_S if spans_hosts or free_cores else UNTIL_WAITED_FOR_S
