"""Environment variables of Horovod: names, types, and which have no effect here. Pure.

Problem: a misspelt variable, or one with text instead of a number, is silently ignored, and the job
may be slow for a reason that is hard to find. Idea: one table of all variables. Unknown names are
reported with the closest known name. All errors are reported together, by the launcher before a
process starts, or by ranks that were started without it.

Source: the documentation of horovodrun and of its tensor fusion, timeline, stall check and
autotune.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import NamedTuple

from braid.errors import raise_all

__all__ = ["PREFIX", "WITHOUT_MEANING", "closest", "read_variables"]

PREFIX = "HOROVOD_"
DYNAMIC = "DYNAMIC"  # the program starts the timeline itself, which is always possible here
LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
YES, NO = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})
Value = int | float | bool | str


class Variable(NamedTuple):
    """One environment variable of Horovod, and the values that it may have.

    Attributes:
        field: Field of `HorovodEnvironment`.
        expected: Description of its values.
        read: Function that converts text to a value; raises ValueError.
    """

    field: str
    expected: str
    read: Callable[[str], Value]


class VariablesRead(NamedTuple):
    """Values of an environment.

    Attributes:
        values: Values by field of `HorovodEnvironment`; unset fields are missing.
        notes: Sentences for the user about unknown names.
    """

    values: Mapping[str, Value]
    notes: tuple[str, ...]


def read_variables(environ: Mapping[str, str]) -> VariablesRead:
    """Read variables that begin with HOROVOD_; an empty variable counts as unset.

    Args:
        environ: Environment, such as `os.environ`.

    Raises:
        ConfigError: Values cannot be read; the message names all of them.
    """
    values: dict[str, Value] = {}
    problems, notes = [], []
    for name in sorted(environ):
        text = environ[name].strip()
        if not name.startswith(PREFIX) or not text:
            continue
        variable = VARIABLES.get(name)
        if variable is not None:
            try:
                values[variable.field] = variable.read(text)
            except ValueError:
                problems.append(f"{name} must be {variable.expected}, got {text!r}")
        elif name not in WITHOUT_MEANING and not name.startswith(BUILDING):
            hint = closest(name, [*VARIABLES, *WITHOUT_MEANING])
            notes.append(f"{name} is not a variable of Horovod and has no effect{hint}")
    raise_all(problems)
    return VariablesRead(values, tuple(notes))


def closest(word: str, known: list[str]) -> str:
    """Return `: did you mean X?` for the closest known name X; empty without one."""
    matches = get_close_matches(word, known, n=1, cutoff=0.75)
    return f": did you mean {matches[0]}?" if matches else ""


def _whole(text: str) -> int:
    number = float(text)  # horovodrun writes sizes as 1.34e+08 now and then
    if number < 0 or not number.is_integer():
        raise ValueError(text)
    return int(text) if text.isdecimal() else int(number)


def _number(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise ValueError(text)
    return number


def _switch(text: str) -> bool:
    if text.lower() in YES | NO:
        return text.lower() in YES
    return _whole(text) > 0  # any number but 0 switches on


def _level(text: str) -> str:
    if text.lower() not in LEVELS:
        raise ValueError(text)
    return text.lower()


BYTES, COUNT = "a number of bytes, 0 or more", "a whole number, 0 or more"
MS, SECONDS = "milliseconds, 0 or more", "seconds, 0 or more"
SWITCH = "0 or 1"

VARIABLES: Mapping[str, Variable] = {
    "HOROVOD_FUSION_THRESHOLD": Variable("fusion_threshold_bytes", BYTES, _whole),
    "HOROVOD_CYCLE_TIME": Variable("cycle_time_ms", MS, _number),
    "HOROVOD_CACHE_CAPACITY": Variable("cache_capacity", COUNT, _whole),
    "HOROVOD_DISABLE_GROUP_FUSION": Variable("disable_group_fusion", SWITCH, _switch),
    "HOROVOD_TIMELINE": Variable(
        "timeline", "a path", lambda text: "" if text == DYNAMIC else text
    ),
    "HOROVOD_TIMELINE_MARK_CYCLES": Variable("timeline_mark_cycles", SWITCH, _switch),
    "HOROVOD_STALL_CHECK_DISABLE": Variable("stall_check", SWITCH, lambda text: not _switch(text)),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": Variable("stall_check_s", SECONDS, _number),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": Variable("stall_shutdown_s", SECONDS, _number),
    "HOROVOD_ELASTIC_TIMEOUT": Variable("elastic_timeout_s", SECONDS, _number),
    "HOROVOD_RESET_LIMIT": Variable("reset_limit", COUNT, _whole),
    "HOROVOD_HIERARCHICAL_ALLREDUCE": Variable("hierarchical_allreduce", SWITCH, _switch),
    "HOROVOD_HIERARCHICAL_ALLGATHER": Variable("hierarchical_allgather", SWITCH, _switch),
    "HOROVOD_AUTOTUNE": Variable("autotune", SWITCH, _switch),
    "HOROVOD_AUTOTUNE_LOG": Variable("autotune_log", "a path", str),
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": Variable("autotune_warmup_samples", COUNT, _whole),
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": Variable("autotune_steps_per_sample", COUNT, _whole),
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": Variable(
        "autotune_bayes_opt_max_samples", COUNT, _whole
    ),
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": Variable(
        "autotune_gaussian_process_noise", "a number, 0 or more", _number
    ),
    "HOROVOD_LOG_LEVEL": Variable("log_level", f"one of {', '.join(LEVELS)}", _level),
}

BUILDING = (  # used only when Horovod is compiled
    "HOROVOD_WITH_",
    "HOROVOD_WITHOUT_",
    "HOROVOD_GPU",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_BUILD_",
    "HOROVOD_CUDA_",
    "HOROVOD_ROCM_",
    "HOROVOD_NCCL_",
    "HOROVOD_DDL_",
)

WITHOUT_MEANING: Mapping[str, str] = {
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": "Adasum is not sent through MPI",
    "HOROVOD_BATCH_D2D_MEMCOPIES": "copies into the fusion buffer are torch's",
    "HOROVOD_CCL_BGT_AFFINITY": "oneCCL is not used",
    "HOROVOD_CCL_CACHE": "oneCCL is not used",
    "HOROVOD_CONTROLLER": "there is only one controller",
    "HOROVOD_CPU_OPERATIONS": "the engine of a group chooses its operations",
    "HOROVOD_CROSS_RANK": "set by horovodrun, for scripts",
    "HOROVOD_CROSS_SIZE": "set by horovodrun, for scripts",
    "HOROVOD_DISABLE_NVTX_RANGES": "there are no NVTX ranges; see the timeline",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "sets can always be added",
    "HOROVOD_ELASTIC": "the launcher decides whether members may change",
    "HOROVOD_ENABLE_ASYNC_COMPLETION": "operations on GPUs are always asynchronous",
    "HOROVOD_ENABLE_XLA_OPS": "TensorFlow is not supported",
    "HOROVOD_GLOO_IFACE": "see --network-interfaces",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "ranks meet at the launcher",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "ranks meet at the launcher",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "every operation has a deadline",
    "HOROVOD_HOSTNAME": "set by horovodrun, for scripts",
    "HOROVOD_LOCAL_RANK": "set by horovodrun, for scripts",
    "HOROVOD_LOCAL_SIZE": "set by horovodrun, for scripts",
    "HOROVOD_LOG_HIDE_TIME": "messages have no timestamp",
    "HOROVOD_LOG_TIMESTAMP": "messages have no timestamp",
    "HOROVOD_MLSL_BGT_AFFINITY": "MLSL is not used",
    "HOROVOD_MPI_THREADS_DISABLE": "MPI is not used",
    "HOROVOD_NUM_NCCL_STREAMS": "torch's NCCL group has one stream",
    "HOROVOD_NUM_STREAMS": "torch's NCCL group has one stream",
    "HOROVOD_OP_TIMEOUT": "every operation has a deadline",
    "HOROVOD_RANK": "set by horovodrun, for scripts",
    "HOROVOD_SIZE": "set by horovodrun, for scripts",
    "HOROVOD_SPARK_PYTHONPATH": "Spark is not supported",
    "HOROVOD_SSH_IDENTITY_FILE": "see -i",
    "HOROVOD_START_TIMEOUT": "for horovodrun, not for ranks",
    "HOROVOD_THREAD_AFFINITY": "the background thread has its rank's CPU affinity",
}
