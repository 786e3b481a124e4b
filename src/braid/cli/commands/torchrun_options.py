"""torchrun's options, and `-np`, as options of `braid run`.

    --nproc-per-node 2        -n 2            --standalone, --rdzv-backend ...      nothing
    --master-port 29500       --port 29500    --rdzv-endpoint a:29400               --rdzv tcp://a:29400

Names may be written with underscores, as torchrun permits. An option that braid does
not support is refused, with the option to use instead. Options of the script come after the script
and stay unchanged.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import get_type_hints

from braid.cli.commands.host_options import HostOptions
from braid.cli.commands.roles import Roles
from braid.errors import ConfigError
from braid.launch.process.job import RunOptions

__all__ = ["separate_command", "translated"]

RENAMED: Mapping[str, str] = {"--nproc-per-node": "--num-ranks", "-np": "--num-ranks"}
TORCHRUNS_PORT = 29400  # default port of a rendezvous endpoint
NUMBERS_OF_DEVICES = ("auto", "gpu", "cpu")  # values of --nproc-per-node
WITHOUT_EFFECT = frozenset(  # every rank is logged and shown; there is one rendezvous
    {
        "--rdzv-backend", "--rdzv-id", "--rdzv-conf", "--monitor-interval", "--start-method",
        "-r", "--redirects", "-t", "--tee", "--local-addr", "--event-log-handler",
        "--signals-to-handle", "--logs-specs", "--shutdown-timeout",
    }
)  # fmt: skip
FLAGS_WITHOUT_EFFECT = frozenset({"--standalone"})
REFUSED: Mapping[str, str] = {
    "--local-ranks-filter": "all ranks are shown; each has a separate log in --log-dir",
    "--run-path": "give the script itself, or -m MODULE",
    "--node-failure-timeout": "hosts that stop answering are reported after 30 s",
}


def _defaults(options: type) -> dict[str, object]:
    """Return the default values of a dataclass of options by their names on the command line."""
    hints = get_type_hints(options, include_extras=True)
    names = {}
    for field in fields(options):
        aliases = [
            getattr(arg, "name", "") for arg in getattr(hints[field.name], "__metadata__", ())
        ]
        names[f"--{next(filter(None, aliases), field.name).replace('_', '-')}"] = field.default
    return names


DEFAULTS = {**_defaults(RunOptions), **_defaults(HostOptions), **_defaults(Roles)}
OWN = ("-n", "--num-ranks", "--port", "-H", *DEFAULTS)
OWN_FLAGS = frozenset(
    {"-m", "--module", "--no-python", "-h", "--help"}
    | {name for name, default in DEFAULTS.items() if default is False}
)
REPEATED = frozenset(name for name, default in DEFAULTS.items() if default == ())


def separate_command(arguments: Sequence[str]) -> list[str]:
    """Put `--` before the script: everything after it belongs to the script."""
    index = 0
    while index < len(arguments):
        argument = arguments[index]
        if argument == "--":
            return list(arguments)
        if not argument.startswith("-"):
            return [*arguments[:index], "--", *arguments[index:]]
        is_alone = argument in OWN_FLAGS or argument.startswith("--no-") or "=" in argument
        index += 1 if is_alone else 2
    return list(arguments)


def translated(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `braid run` with torchrun's options replaced.

    Args:
        arguments: Arguments after `run`, with the script and its arguments.

    Returns:
        Options of braid, then the script and its arguments unchanged.

    Raises:
        ConfigError: An option is unknown or not supported.

    >>> translated(["--standalone", "--nproc_per_node=2", "train.py", "--lr", "1"])
    ['--num-ranks', '2', 'train.py', '--lr', '1']
    """
    options: dict[str, str] = {}
    kept: list[str] = []
    index = 0
    while index < len(arguments) and arguments[index].startswith("-") and arguments[index] != "--":
        option, has_value, value = arguments[index].partition("=")
        name = option.replace("_", "-") if option.startswith("--") else option
        name = RENAMED.get(name, name)
        index += 1
        if name in OWN_FLAGS or name in FLAGS_WITHOUT_EFFECT:
            kept += [name] if name in OWN_FLAGS else []
            continue
        _refuse(option, name)
        if not has_value:
            if index == len(arguments):
                msg = f"{option} needs a value: `braid run --help` lists the options"
                raise ConfigError(msg)
            value = arguments[index]
            index += 1
        if name in REPEATED:
            kept += [name, value]
        elif name not in WITHOUT_EFFECT:
            options[name] = value
    _meet(options)
    _check_values(options)
    for name, value in options.items():
        kept += [f"{name}={value}"] if value.startswith("-") else [name, value]
    return [*kept, *arguments[index:]]


def _refuse(option: str, name: str) -> None:
    if name in REFUSED:
        msg = f"braid run has no {option} of torchrun: {REFUSED[name]}"
        raise ConfigError(msg)
    torchs = {"--max-restarts", "--master-addr", "--master-port", "--rdzv-endpoint"}
    known = {*OWN, *OWN_FLAGS, *WITHOUT_EFFECT, *RENAMED, *torchs}
    if name not in known:
        names = [*OWN, *OWN_FLAGS, *RENAMED]
        begin = [one for one in names if one.startswith(name)]
        similar = begin or difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {similar[0]}? " if similar else ""
        msg = f"braid run has no option {option}: {hint}`braid run --help` lists them all"
        raise ConfigError(msg)


def _meet(options: dict[str, str]) -> None:
    """Replace torchrun's rendezvous options by braid's; one host needs none."""
    nodes = options.get("--nnodes", "1")
    low, _, high = nodes.partition(":")
    if high and low != high:
        msg = (
            f"--nnodes {nodes} lets the number of hosts change, which braid run does not: give "
            f"one number, such as --nnodes {high}"
        )
        raise ConfigError(msg)
    address, port = options.pop("--master-addr", ""), options.pop("--master-port", "")
    endpoint = options.pop("--rdzv-endpoint", "")
    if low == "1" and "--rdzv" not in options:
        options.pop("--nnodes", None)
        if options.get("--node-rank") == "0":
            del options["--node-rank"]
        if port:
            options.setdefault("--port", port)
        return
    options["--nnodes"] = low
    if not endpoint and address:
        endpoint = address
    if endpoint:
        endpoint = endpoint if ":" in endpoint else f"{endpoint}:{port or TORCHRUNS_PORT}"
        options.setdefault("--rdzv", f"tcp://{endpoint}")


def _check_values(options: dict[str, str]) -> None:
    restarts = options.pop("--max-restarts", "0")
    if restarts != "0":
        msg = (
            f"--max-restarts {restarts}: braid run does not restart ranks. Start it again with "
            "--resume auto, which continues from the last checkpoint"
        )
        raise ConfigError(msg)
    number = options.get("--num-ranks", "1")
    if number in NUMBERS_OF_DEVICES:
        msg = (
            f"--nproc-per-node {number} asks braid to count devices: give the number of ranks, -n 2"
        )
        raise ConfigError(msg)
