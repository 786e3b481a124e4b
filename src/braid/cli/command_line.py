"""The command `braid`: one small function per subcommand, which imports its package when it runs.

`braid --help` must be fast and `braid run` must not import torch, so this module imports only the
standard library and tyro. tyro makes options and help from the functions' signatures and
docstrings. A new command is a function, in this module or in `commands/`, and an entry of
`COMMANDS`.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import tyro

from braid._version import __version__
from braid.cli.commands.checkpoint import (
    checkpoint_export,
    checkpoint_ls,
    checkpoint_reshard,
    checkpoint_verify,
)
from braid.cli.commands.convert import convert
from braid.cli.commands.engines import k8s_manifest, slurm_script
from braid.cli.commands.host_options import HostOptions
from braid.cli.commands.overview import family_text, overview
from braid.cli.commands.plan import plan
from braid.cli.commands.plan_pipedream import plan_pipedream
from braid.cli.commands.probe import probe
from braid.cli.commands.profile import profile
from braid.cli.commands.prove import prove
from braid.cli.commands.roles import Roles
from braid.cli.commands.schedule import (
    schedule_check,
    schedule_compare,
    schedule_show,
    schedule_simulate,
)
from braid.cli.commands.torchrun_options import separate_command, translated
from braid.errors import ConfigError
from braid.launch.process.job import RunOptions
from braid.runtime.last_words import drop_unwritten, ending_well, print_error
from braid.runtime.option_types import Command, Directory, Module, NumRanks, shown_as

__all__ = ["COMMANDS", "TYRO_CONFIG", "answer", "main", "separate_command"]

USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130
HELP_OPTIONS = ("-h", "--help")
TYRO_CONFIG = (tyro.conf.FlagCreatePairsOff,)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        arguments: Arguments after `braid`; `sys.argv[1:]` if None.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    return ending_well(lambda: _answer(words))


def _answer(arguments: list[str]) -> int:
    """Run the command that `arguments` names, or print why it cannot run."""
    if arguments[:1] in (["--version"], ["-V"]):
        print(f"braid {__version__}")
        return 0

    def run() -> int:
        if arguments[:1] == ["run"]:
            arguments[1:] = separate_command(translated(arguments[1:]))
        elif arguments[:1] == ["chaos"]:
            arguments[1:] = separate_command(arguments[1:])
        elif arguments[:2] in (["slurm", "script"], ["k8s", "manifest"]):
            arguments[2:] = separate_command(joined(arguments[2:], "--options"))
        return _dispatch(arguments)

    return answer(
        run, "started" if arguments[:1] in (["run"], ["train"], ["demo"], ["chaos"]) else "done"
    )


def answer(command: Callable[[], int], what: str = "done") -> int:
    """Run a command, and convert a ConfigError to an error block and an exit code.

    Args:
        command: Function that returns the exit code.
        what: `done` or `started`, for the message "nothing was done" or "nothing was started".
    """
    try:
        return command()
    except ConfigError as exc:
        print_error(f"nothing was {what} (exit {USAGE_EXIT_CODE})", str(exc))
        return USAGE_EXIT_CODE
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE


def _dispatch(arguments: list[str]) -> int:
    """Run the command that `arguments` names, or print the help of its family."""
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if name in COMMANDS:
            prog, rest = f"braid {name}", arguments[words:]
            command = COMMANDS[name]
            target = command.load() if isinstance(command, Lazy) else command
            if callable(target):
                return int(tyro.cli(target, prog=prog, args=rest, config=TYRO_CONFIG))
            options = tyro.cli(target.options, prog=prog, args=rest, config=TYRO_CONFIG)
            return int(target.run(options))
    family, *rest = arguments or [""]
    asked = not rest or rest[0] in HELP_OPTIONS
    if family in HELP_OPTIONS:
        print(overview(COMMANDS, __version__))
        return 0
    if not family:
        print(overview(COMMANDS, __version__), file=sys.stderr)
        return USAGE_EXIT_CODE
    _check_command(family, rest)
    text = family_text(family, COMMANDS)
    print(text, file=sys.stdout if rest and asked else sys.stderr)
    return 0 if rest and asked else USAGE_EXIT_CODE


def _check_command(first: str, rest: Sequence[str]) -> None:
    """Raise ConfigError for an unknown command, with a similar one."""
    families = {command.split(" ")[0] for command in COMMANDS}
    prefix, word = "", first
    if first in families:
        if not rest or rest[0].startswith("-"):
            return
        prefix, word = f"{first} ", rest[0]
    choices = [command for command in COMMANDS if command.startswith(prefix)]
    known = {command.removeprefix(prefix) for command in choices} | (set() if prefix else families)
    similar = difflib.get_close_matches(word, sorted(known), 1)
    hint = (
        f"did you mean {prefix}{similar[0]}?" if similar else f"choose one of {', '.join(choices)}"
    )
    msg = f"there is no command {prefix}{word}: {hint}"
    raise ConfigError(msg)


def joined(arguments: Sequence[str], option: str) -> list[str]:
    """Join `option` and its value in `arguments` by =, since the value may begin with dashes."""
    words = list(arguments)
    if option in words[:-1]:
        index = words.index(option)
        words[index : index + 2] = [f"{option}={words[index + 1]}"]
    return words


def run(
    command: Command = (),
    *,
    n: NumRanks = None,
    module: Module = False,
    no_python: bool = False,
    port: str = "auto",
    options: Annotated[RunOptions, tyro.conf.arg(name="")] = RunOptions(),  # noqa: B008 - frozen
    on: Annotated[HostOptions, tyro.conf.arg(name="")] = HostOptions(),  # noqa: B008 - frozen
    roles: Annotated[Roles, tyro.conf.arg(name="")] = Roles(),  # noqa: B008 - frozen
) -> int:
    """Run a program on N ranks of one or several hosts, and name the rank that made it fail.

    Programs written for torchrun run unchanged. Standard input is empty without --stdin.

    Args:
        command: Script and its arguments: everything after SCRIPT belongs to it.
        n: Number of ranks (default: --max-ranks, or 1); with -H on all hosts (default: all slots),
            with --on ray (default: all that fit), with --nnodes on this host.
        module: SCRIPT is the name of a Python module.
        no_python: SCRIPT is a program of any kind.
        port: MASTER_PORT for torch.distributed, or auto.
        options: Logs and limits.
        on: Hosts to run on.
        roles: Roles of ranks, and ranks that may be lost.
    """
    from braid.cli.commands.several_hosts import choose_where, run_on
    from braid.launch import JobSpec, Supervisor, TerminalConsole
    from braid.runtime.variables import NO_FRAME_MAC

    if module and no_python:
        msg = (
            "-m and --no-python exclude each other: SCRIPT is either a module or a program, so "
            "leave one of the two out"
        )
        raise ConfigError(msg)
    if port != "auto" and not port.isdecimal():
        msg = f"--port must be auto or a number, got {port!r}"
        raise ConfigError(msg)
    n = roles.num_ranks(n)
    can_grow = on.on == "ray" or (on.on == "" and on.hostfile != "")
    is_fixed = on.nnodes is None and not can_grow  # before it has begun
    if n is None and is_fixed:
        n = roles.max_ranks or None
    where, repeated = choose_where(on, n)
    if n is not None and is_fixed and n < roles.max_ranks:
        msg = (
            f"--max-ranks {roles.max_ranks} is more than -n {n}, and no further hosts or slots can "
            "come: leave --max-ranks out, name the hosts with --hostfile FILE, which is read again "
            "during the run, or use --on ray"
        )
        raise ConfigError(msg)
    if roles.words:
        repeated = (*(repeated or ("-n", str(1 if n is None else n))), *roles.words)
    job = JobSpec(
        command=command,
        kind="module" if module else "program" if no_python else "script",
        num_ranks=1 if n is None else n,
        port=None if port == "auto" else int(port),
        **asdict(options),
        where=repeated,
        environ=roles.environ() | ({NO_FRAME_MAC: "1"} if on.no_frame_mac else {}),
        expendable=roles.expendable,
        needed=roles.needed,
        elastic=roles.elastic,
    )
    prefixed = where is not None or job.num_ranks > 1
    with TerminalConsole(sys.stdout, sys.stderr, prefixed=prefixed) as console:
        if where is None:
            outcome = Supervisor(console, owns_process=True).run(job)
            exit_code, text = outcome.exit_code, str(outcome)
        else:
            exit_code, text = run_on(where, job, console)
    drop_unwritten()  # the logs are complete; keep the job's exit code
    if text:
        print(text, file=sys.stderr, flush=True)
    return exit_code


def demo(*, n: NumRanks = None, log_dir: Directory = None) -> int:
    """Train a model alone and in parallel, and prove that the weights are equal, in half a minute.

    Args:
        n: Number of ranks of the parallel training (default: 2, or 1 on a single core).
        log_dir: Directory of the two runs (default: ./runs/demo-<date>_<hex>).
    """
    from rich.console import Console

    from braid.train.command import choose_log_dir
    from braid.train.demo.show import show

    return show(Console(), num_ranks=n, log_dir=log_dir or choose_log_dir("", "demo-"))


def report(
    run_directory: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    others: Annotated[tyro.conf.Positional[tuple[str, ...]], shown_as("RUN")] = (),
    *,
    out: Annotated[str | None, shown_as("FILE")] = None,
    show: Annotated[bool, tyro.conf.arg(name="open")] = False,
    to: Annotated[str, shown_as("TRACKER")] = "",
    place: Annotated[str, shown_as("NAME")] = "",
    follow: bool = False,
) -> int:
    """Write a run's report (one HTML file) and its trace, or a page that compares runs.

    Exit code 1 means that both are written, but a file of the run could not be read.

    Args:
        run_directory: Directory of the run, as `braid run` printed it.
        others: Further runs to compare with the first one (up to 3).
        out: File for the report; the trace is written to the same directory (default:
            RUN/report.html, or compare.html in the directory of the last of several runs).
        show: Open the report in a browser.
        to: Send the run's numbers to tensorboard, mlflow, wandb or trackio instead.
        place: Directory (tensorboard), experiment (mlflow) or project to send to (default: braid).
        follow: With --to, continue until the run ends.
    """
    import webbrowser
    from pathlib import Path

    from rich.console import Console

    from braid.launch.observe import print_comparison, print_summary, publish, publish_comparison
    from braid.launch.observe.trackers import open_tracker, send_run
    from braid.runtime.clock import MonotonicClock

    if to:
        clock = MonotonicClock()
        for path in (run_directory, *others):
            count = send_run(Path(path), open_tracker(to, place), follow=follow, clock=clock)
            print(f"braid: {count:,} steps of {path} sent to {to}, {place or 'braid'}")
        return 0
    if others:
        paths = [Path(run_directory), *map(Path, others)]
        comparison, page = publish_comparison(paths, Path(out) if out else None)
        print_comparison(comparison, Console(), page=page)
        if show:
            webbrowser.open(page.resolve().as_uri())
        return 1 if any(story.run.notices for story in comparison.stories) else 0
    published = publish(Path(run_directory), Path(out) if out else None)
    print_summary(published.story, Console(), report=published.report, trace=published.trace)
    if show:
        webbrowser.open(published.report.resolve().as_uri())
    return 1 if published.story.run.notices else 0


def doctor(
    *,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Check whether braid can work on this machine, and print what would make it work better.

    Exit code 1 means that a problem prevents every run.

    Args:
        as_json: Print the findings as JSON.
    """
    import msgspec
    from rich.console import Console

    from braid.cli.doctor import examine, show

    diagnosis = examine()
    if as_json:
        rows = [finding._asdict() for finding in diagnosis.findings]
        text = msgspec.json.encode({"usable": diagnosis.usable, "findings": rows})
        print(msgspec.json.format(text, indent=2).decode())
    else:
        show(diagnosis, Console())
    return 0 if diagnosis.usable else 1


class Lazy(NamedTuple):
    """A command that is imported when it runs, so that `braid --help` stays fast.

    Attributes:
        module: Module below `braid.cli`.
        name: Function or `Benchmark` in the module.
        summary: First line of the help.
    """

    module: str
    name: str
    summary: str

    def load(self) -> Any:
        """Return the function or the benchmark."""
        return getattr(import_module(f"braid.cli.{self.module}"), self.name)


COMMANDS: Mapping[str, Callable[..., int] | Lazy] = {
    "run": run,
    "bench comm": Lazy(
        "bench.comm",
        "BENCH",
        "Measure collectives against Gloo and MPI, in turns in one run: table, JSON, plot.",
    ),
    "bench ddp": Lazy(
        "bench.ddp",
        "BENCH",
        "Measure data parallel training: torch's DDP over Gloo and over braid, and braid's DDP.",
    ),
    "slurm script": slurm_script,
    "k8s manifest": k8s_manifest,
    "convert": convert,
    "plan": plan,
    "plan pipedream": plan_pipedream,
    "probe": probe,
    "profile": profile,
    "schedule show": schedule_show,
    "schedule check": schedule_check,
    "schedule simulate": schedule_simulate,
    "schedule compare": schedule_compare,
    "prove": prove,
    "train": Lazy("commands.train", "train", "Train a GPT on bytes, on N ranks of this host."),
    "demo": demo,
    "report": report,
    "status": Lazy(
        "commands.status",
        "status",
        "Show the ranks of a running job: states, members, steps, faults.",
    ),
    "chaos": Lazy(
        "commands.chaos",
        "chaos",
        "Strike the ranks of a run with faults, and write a page on how the run survived.",
    ),
    "doctor": doctor,
    "checkpoint ls": checkpoint_ls,
    "checkpoint verify": checkpoint_verify,
    "checkpoint export": checkpoint_export,
    "checkpoint reshard": checkpoint_reshard,
}
