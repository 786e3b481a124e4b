"""Conversion of horovodrun's options to a job of braid's launcher. Pure.

    horovodrun -np 4 -H a:2,b:2 --cycle-time-ms 3 python train.py --lr 0.1

    HOROVOD_CYCLE_TIME=3 braid run -n 4 -H a:2,b:2 --env HOROVOD_CYCLE_TIME train.py --lr 0.1

horovodrun runs any program. braid's launcher checks Python scripts before it starts them, so the
current interpreter is removed from the command; every other command is run unchanged.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Literal

from braid.compat.horovod.launcher.elastic_plan import ElasticPlan, elastic_plan, wants_elastic
from braid.compat.horovod.launcher.flags import Flags
from braid.compat.horovod.launcher.options import BY_NAME
from braid.compat.horovod.variables import PREFIX, VARIABLES, read_variables
from braid.errors import ConfigError, raise_all
from braid.launch import RANK_VARIABLES, Host, Hosts, JobSpec, parse_hosts
from braid.launch.cluster.remote_shell import DEFAULT_RSH
from braid.launch.engines.options import EngineOptions

__all__ = ["OF_RANKS", "Launch", "plan", "program", "rsh_command", "with_rank_variables"]

Kind = Literal["script", "module", "program"]
PYTHON = re.compile(r"python(?:3(?:\.[0-9]+)?)?")
HOSTS_LIMIT_S = 60.0  # a cold start of the interpreter from a shared file system
OF_RANKS = {  # variable that scripts read, variable that the launcher sets
    "HOROVOD_RANK": "RANK",
    "HOROVOD_SIZE": "WORLD_SIZE",
    "HOROVOD_LOCAL_RANK": "LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE": "LOCAL_WORLD_SIZE",
    "HOROVOD_CROSS_RANK": "GROUP_RANK",
    "HOROVOD_CROSS_SIZE": "GROUP_WORLD_SIZE",
    "HOROVOD_HOSTNAME": "HOSTNAME",
}
SOURCES = ("hosts", "hostfile", "host-discovery-script")
START_TIMEOUT = "HOROVOD_START_TIMEOUT"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A job to launch, with its hosts and notes for the user.

    Attributes:
        job: Job that each rank runs.
        hosts: Hosts where it runs; only this host when None.
        variables: HOROVOD_* variables that options have set.
        notes: Sentences for the user.
        elastic: Elastic part of the job; None if its ranks are fixed.
        engine: Engine that starts the ranks; None without one.
    """

    job: JobSpec
    hosts: Hosts | None
    variables: Mapping[str, str]
    notes: tuple[str, ...]
    elastic: ElasticPlan | None = None
    engine: EngineOptions | None = None

    def __str__(self) -> str:
        """Return the equivalent command of `braid run`."""
        assignments = [f"{name}={value}" for name, value in sorted(self.variables.items())]
        kind = {"script": [], "module": ["-m"], "program": ["--no-python"]}[self.job.kind]
        where = self.job.where or ("-n", str(self.job.num_ranks))
        return shlex.join([*assignments, "braid", "run", *where, *kind, *self.job.command])


def plan(
    flags: Flags,
    environ: Mapping[str, str],
    *,
    hosts: tuple[Host, ...] = (),
    is_own_python: Callable[[str], bool] = lambda _word: True,
    is_here: Callable[[str], bool] = lambda word: word == "localhost",
) -> Launch:
    """Return the job for the options of a command line.

    Args:
        flags: Options and command.
        environ: Environment that ranks inherit, except for variables that options set.
        hosts: Hosts of --hostfile, or of --host-discovery-script.
        is_own_python: Function that returns whether a word such as `python` is the current
            interpreter.
        is_here: Function that returns whether a name is a name of this host.

    Raises:
        ConfigError: Values cannot be parsed (all are named), options are invalid, or the command is
            missing.
    """
    is_elastic = wants_elastic(flags)
    problems = _empty(flags)
    variables = _variables(flags, problems)
    num_ranks = _number(flags, "num-proc", "a whole number, 1 or more", problems)
    port = _number(flags, "ssh-port", "a port, 1 to 65535", problems, highest=65535)
    limit_s = _start_limit(flags, environ, problems)
    sources = [f"--{name}" for name in SOURCES if flags[name]]
    if len(sources) > 1:
        problems.append(f"{' and '.join(sources)} both name the hosts: leave one of them out")
    if not flags.values.keys() & {"num-proc", *SOURCES, "min-np"}:
        problems.append("the number of ranks is missing: add -np N")
    if not flags.command:
        problems.append("the command is missing: end with one such as `python train.py`")
    if is_elastic and flags.is_on("mpi"):
        problems.append("mpirun starts a fixed number of ranks: leave --mpi or --min-np out")
    raise_all(problems)
    kind, command = program(flags.command, is_own_python)
    environment = {**environ, **variables}
    variables_read = read_variables(environment)
    named = parse_hosts(flags["hosts"]) if flags["hosts"] else hosts
    elastic = elastic_plan(flags, named, is_here) if is_elastic else None
    engine = _mpi(flags, named, num_ranks, limit_s, environment) if flags.is_on("mpi") else None
    if elastic is not None:
        named, num_ranks = elastic.hosts, elastic.num_ranks
    spans_hosts = bool(named) and engine is None
    where = _where(flags, named, num_ranks, port, limit_s, environment) if spans_hosts else None
    job = JobSpec(
        command=command,
        kind=kind,
        num_ranks=num_ranks or sum(host.slots for host in named),
        log_dir=flags["output-filename"] or None,
        where=_again(flags, where or engine, num_ranks, elastic),
        environ=environment,
        elastic=elastic.limits if elastic else None,
    )
    spans_hosts = where is not None or engine is not None
    notes = (*_notes(flags, spans_hosts), *_other_python(flags, kind), *variables_read.notes)
    return Launch(
        job=job, hosts=where, variables=variables, notes=notes, elastic=elastic, engine=engine
    )


def with_rank_variables(launch: Launch) -> Launch:
    """Return the launch with Horovod's variables of rank and host added for each rank."""
    pairs = " ".join(f"{name}={source}" for name, source in OF_RANKS.items())
    job = replace(launch.job, environ={**launch.job.environ, RANK_VARIABLES: pairs})
    hosts, engine = launch.hosts, launch.engine
    if hosts is not None:
        hosts = replace(hosts, environ=(*hosts.environ, RANK_VARIABLES))
    if engine is not None:
        engine = replace(engine, environ=(*engine.environ, RANK_VARIABLES))
    return replace(launch, job=job, hosts=hosts, engine=engine)


def program(
    command: tuple[str, ...], is_own_python: Callable[[str], bool]
) -> tuple[Kind, tuple[str, ...]]:
    """Return the kind of program that a command runs, and its words.

    Args:
        command: Command as typed.
        is_own_python: As for `plan`.

    Raises:
        ConfigError: The command is an interpreter without a program.
    """
    word, rest = command[0], list(command[1:])
    if PYTHON.fullmatch(PurePath(word).name) is None or not is_own_python(word):
        return ("script" if word.endswith(".py") else "program"), command
    if not rest:
        msg = (
            f"{word} is followed by no program, and ranks cannot read one from standard input: "
            "name a script or -m module"
        )
        raise ConfigError(msg)
    while rest[0] == "-u" and len(rest) > 1:  # output is never buffered
        del rest[0]
    if rest[0] == "-m" and len(rest) > 1:
        return "module", tuple(rest[1:])
    if rest[0].startswith("-"):  # further options of the interpreter, or -c
        return "program", command
    return "script", tuple(rest)


def rsh_command(port: int | None, identity_file: str) -> str:
    """Return the command to reach a host; see `Hosts.rsh`."""
    options = ["-p", str(port)] if port else []
    options += ["-i", identity_file] if identity_file else []
    if "{" in identity_file:
        msg = f"the path of an SSH key must not contain braces, got {identity_file!r}"
        raise ConfigError(msg)
    return (
        DEFAULT_RSH.replace("{host}", f"{shlex.join(options)} {{host}}") if options else DEFAULT_RSH
    )


def _empty(flags: Flags) -> list[str]:
    """Return errors for empty values, for example from unset shell variables."""
    rows = [BY_NAME[name] for name, text in flags.values.items() if not text]
    return [
        f"--{row.name} needs a value, {row.metavar} ({row.help}), got ''"
        for row in rows
        if row.metavar and row.use == "here" and not row.variable
    ]


def _variables(flags: Flags, problems: list[str]) -> dict[str, str]:
    """Return the HOROVOD_* variables of options; errors name the options as typed."""
    variables: dict[str, str] = {}
    for name, text in flags.values.items():
        option = BY_NAME[name]
        if not option.variable:
            continue
        value = option.convert(text)
        row = VARIABLES.get(option.variable)
        try:
            if row is not None:
                row.read(value)
        except ValueError:
            expected = "megabytes, 0 or more" if name.endswith("-mb") else row and row.expected
            problems.append(f"--{name} must be {expected}, got {text!r}")
        variables[option.variable] = value
    return variables


def _number(
    flags: Flags, name: str, expected: str, problems: list[str], *, highest: int = 1 << 30
) -> int | None:
    text = flags[name]
    if not text:
        return None
    if re.fullmatch(r"[0-9]{1,9}", text) and 1 <= int(text) <= highest:
        return int(text)
    problems.append(f"--{name} must be {expected}, got {text!r}")
    return None


def _start_limit(flags: Flags, environ: Mapping[str, str], problems: list[str]) -> float:
    name = "--start-timeout" if flags["start-timeout"] else START_TIMEOUT
    text = flags["start-timeout"] or environ.get(START_TIMEOUT, "")
    try:
        value = float(text or HOSTS_LIMIT_S)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        problems.append(f"{name} must be seconds, more than 0, got {text!r}")
    return value


def _where(
    flags: Flags,
    named: tuple[Host, ...],
    num_ranks: int | None,
    port: int | None,
    limit_s: float,
    environ: Mapping[str, str],
) -> Hosts:
    return Hosts(
        hosts=named,
        num_ranks=num_ranks,
        rsh=rsh_command(port, flags["ssh-identity-file"]),
        interfaces=tuple(filter(None, flags["network-interfaces"].split(","))),
        environ=tuple(sorted(name for name in environ if name.startswith(PREFIX))),
        start_limit_s=limit_s,
    )


def _mpi(
    flags: Flags,
    named: tuple[Host, ...],
    num_ranks: int | None,
    limit_s: float,
    environ: Mapping[str, str],
) -> EngineOptions:
    """Return the engine options with which mpirun starts the ranks."""
    hosts = (f"--hosts={','.join(map(str, named))}",) if named else ()
    try:
        words = (*hosts, *shlex.split(flags["mpi-args"]))
    except ValueError as exc:
        msg = f"--mpi-args cannot be split into words: {exc}, got {flags['mpi-args']!r}"
        raise ConfigError(msg) from exc
    return EngineOptions(
        engine="mpi",
        num_ranks=num_ranks,
        words=words,
        interfaces=tuple(filter(None, flags["network-interfaces"].split(","))),
        environ=tuple(sorted(name for name in environ if name.startswith(PREFIX))),
        start_limit_s=limit_s,
    )


def _again(
    flags: Flags,
    where: Hosts | EngineOptions | None,
    num_ranks: int | None,
    elastic: ElasticPlan | None,
) -> tuple[str, ...]:
    """Return the equivalent options of `braid run`."""
    limits = () if elastic is None else elastic.options
    if where is None:
        return ("-n", str(num_ranks), *limits) if limits else ()
    by_mpi = isinstance(where, EngineOptions)
    options = {
        "--on": "mpi" if by_mpi else "",
        "--engine-options": flags["mpi-args"] if by_mpi else "",
        "-n": str(num_ranks or ""),
        "-H": ",".join(map(str, elastic.hosts)) if elastic is not None else flags["hosts"],
        "--hostfile": flags["hostfile"] if elastic is None else "",
        "--rsh": where.rsh if isinstance(where, Hosts) and where.rsh != DEFAULT_RSH else "",
        "--network-interface": ",".join(where.interfaces),
        "--env": ",".join(where.environ),
    }
    words = (word for name, value in options.items() if value for word in (name, value))
    return (*words, *limits)


def _other_python(flags: Flags, kind: Kind) -> list[str]:
    word = flags.command[0]
    if kind != "program" or PYTHON.fullmatch(PurePath(word).name) is None:
        return []
    return [
        (
            f"{shlex.join(flags.command[:2])} ...: runs unchanged, in an interpreter that must "
            "also have braid"
        )
    ]


def _notes(flags: Flags, spans_hosts: bool) -> list[str]:
    empty = [f"--{name}" for name in flags.values if BY_NAME[name].use == "none"]
    notes = [f"{', '.join(empty)}: no effect here"] if empty else []
    names = ("ssh-port", "ssh-identity-file", "network-interfaces", "start-timeout")
    needless = [f"--{name}" for name in names if flags[name]]
    if needless and not spans_hosts:
        notes.append(f"{', '.join(needless)}: these options have no effect, as no hosts are named")
    if flags["mpi-args"] and not flags.is_on("mpi"):
        notes.append("--mpi-args: no effect without --mpi")
    return notes
