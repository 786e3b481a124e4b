"""Where a rank finds itself: the variables that a launcher sets, read once and checked as a whole.

Problem: every launcher speaks through the environment, and a job that was started half by hand has
some of the variables and not the others. Programs then hang in their first collective, or all of
them become rank 0, because each variable was read where it was needed, with a default.

Idea: one frozen value, parsed from one mapping; everything that is wrong is said in one message.
torchrun's names are the contract in both directions: braid runs under torchrun, and torch programs
run under braid.

Source: environment of `torchrun` (torch.distributed.elastic.multiprocessing, "Environment
Variables").
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass

from braid.errors import ConfigError

__all__ = ["JobEnvironment", "wants_portable"]

CONTRACT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEnvironment:
    """What a launcher told this process.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks of the job.
        local_rank: Rank among those of this host.
        local_world_size: Number of ranks on this host.
        node_rank: Number of this host.
        num_nodes: Number of hosts; 1 when not told.
        run_id: Name of the run, the same on all ranks.
        master_addr: Host of rank 0, for `torch.distributed`; empty when not told.
        master_port: Port for `torch.distributed` on `master_addr`; 0 when not told.
        store_address: Where braid's launcher serves the store and control; empty without it.
        secret_fd: Descriptor of the job's secret, None without braid's launcher.
        events_fd: Descriptor of the memory for this rank's events, None without braid's launcher.
        stacks_fd: Descriptor to dump stacks to, None without braid's launcher.
        log_dir: Directory of the run's logs; empty when not told.
        resume: Checkpoint to resume from (`auto`: the last complete one); empty for a new start.
        launched_by: `braid`, `torchrun` (or anything that keeps its contract), or `single`.
        agent_store: Whether the launcher itself serves torch's store on `master_port`; else rank 0
        does.
        portable: Whether ranks shall send each other copies even where they could share memory.
        listen: IP address on which this rank listens for ranks of other hosts; empty when the job
            is on one host, or when the rank shall find out which address of its host leads to
            `master_addr`.
        secret_file: File with the job's secret (mode 0600, see `Secret.from_file`), for several
            hosts without braid's launcher; empty when not told.
        insecure_network: Whether ranks of several hosts may trust whoever connects, because nobody
            gave them a secret.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    run_id: str = "single"
    master_addr: str = ""
    master_port: int = 0
    store_address: str = ""
    secret_fd: int | None = None
    events_fd: int | None = None
    stacks_fd: int | None = None
    log_dir: str = ""
    resume: str = ""
    launched_by: str = "single"
    agent_store: bool = False
    portable: bool = False
    listen: str = ""
    secret_file: str = ""
    insecure_network: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value}, expected {low} <= {name} < {high} ({bound})"
            for name, value, low, high, bound in (
                ("RANK", self.rank, 0, self.world_size, "WORLD_SIZE"),
                ("LOCAL_RANK", self.local_rank, 0, self.local_world_size, "LOCAL_WORLD_SIZE"),
                (
                    "LOCAL_WORLD_SIZE",
                    self.local_world_size,
                    1,
                    self.world_size + 1,
                    "WORLD_SIZE + 1",
                ),
                ("MASTER_PORT", self.master_port, 0, 65536, "ports have 16 bits"),
            )
            if not low <= value < high
        ]
        problems += _network_problems(self)
        _refuse(problems)

    @classmethod
    def parse(cls, environ: Mapping[str, str]) -> JobEnvironment:
        """Read the variables of a launcher.

        Without any of them this process is a world of one.

        Args:
            environ: The environment, such as `os.environ`.

        Raises:
            ConfigError: Values that are no numbers, ranks outside of the world, or some variables
                without the others; the message lists every problem.
        """
        if not any(environ.get(name) for name in (*CONTRACT[:2], "BRAID_STORE")):
            return cls(
                log_dir=environ.get("BRAID_LOG_DIR", ""),
                resume=environ.get("BRAID_RESUME", ""),
                portable=wants_portable(environ),
            )
        reader = _Reader(environ)
        rank = reader.required("RANK")
        world_size = reader.required("WORLD_SIZE")
        by_braid = bool(environ.get("BRAID_STORE"))
        if not by_braid and world_size != 1:
            reader.text("MASTER_ADDR")
            reader.required("MASTER_PORT")
        told = environ.get("BRAID_PLACE", "") if by_braid else ""
        for name, value, was in zip(CONTRACT, (rank, world_size), told.split("/"), strict=False):
            if told and str(value) != was:  # ranks would wait for one that will never be
                reader.problems.append(f"{name} is {value}, expected {was} as `braid run` set it")
        fds = {
            name: reader.required(f"BRAID_{name.upper()}") if by_braid else None
            for name in ("secret_fd", "events_fd", "stacks_fd")
        }
        run_id = environ.get("BRAID_RUN_ID") or environ.get("TORCHELASTIC_RUN_ID") or "none"
        local_rank = reader.optional("LOCAL_RANK", rank)
        local_world_size = reader.optional("LOCAL_WORLD_SIZE", world_size)
        node_rank = reader.optional("NODE_RANK", reader.optional("GROUP_RANK", 0))
        num_nodes = reader.optional("GROUP_WORLD_SIZE", 1)
        master_port = reader.optional("MASTER_PORT", 0)
        portable = reader.switch("BRAID_PORTABLE")
        insecure_network = reader.switch("BRAID_INSECURE_NETWORK")
        _refuse(reader.problems)
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            node_rank=node_rank,
            num_nodes=num_nodes,
            **fds,
            run_id=run_id,
            master_addr=environ.get("MASTER_ADDR", ""),
            master_port=master_port,
            store_address=environ.get("BRAID_STORE", ""),
            log_dir=environ.get("BRAID_LOG_DIR", ""),
            resume=environ.get("BRAID_RESUME", ""),
            launched_by="braid" if by_braid else "torchrun",
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            portable=portable,
            listen=environ.get("BRAID_LISTEN", ""),
            secret_file=environ.get("BRAID_SECRET_FILE", ""),
            insecure_network=insecure_network,
        )

    @classmethod
    def from_os(cls) -> JobEnvironment:
        """Read the environment of this process; nothing but this module does."""
        return cls.parse(os.environ)

    def to_environ(self) -> dict[str, str]:
        """The variables that tell a process this, for torch programs as well; the inverse of `parse`."""
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "NODE_RANK": self.node_rank,
            "GROUP_RANK": self.node_rank,
            "GROUP_WORLD_SIZE": self.num_nodes,
            "ROLE_RANK": self.rank,
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": self.world_size,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "BRAID_RUN_ID": self.run_id,
            "BRAID_STORE": self.store_address,
            "BRAID_SECRET_FD": self.secret_fd,
            "BRAID_EVENTS_FD": self.events_fd,
            "BRAID_STACKS_FD": self.stacks_fd,
            "BRAID_LOG_DIR": self.log_dir,
            "BRAID_RESUME": self.resume,
            "BRAID_PLACE": f"{self.rank}/{self.world_size}" if self.store_address else "",
            "BRAID_PORTABLE": "1" if self.portable else "",
            "BRAID_LISTEN": self.listen,
            "BRAID_SECRET_FILE": self.secret_file,
            "BRAID_INSECURE_NETWORK": "1" if self.insecure_network else "",
        }
        return {name: str(value) for name, value in values.items() if value not in {None, ""}}


class _Reader:
    """Reads numbers from a mapping and remembers what was wrong."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.problems: list[str] = []
        self._environ = environ

    def text(self, name: str) -> str:
        value = self._environ.get(name, "")
        if not value:
            self.problems.append(f"{name} is not set")
        return value

    def required(self, name: str) -> int:
        return self._number(name, value) if (value := self.text(name)) else 0

    def optional(self, name: str, default: int) -> int:
        value = self._environ.get(name, "")
        return self._number(name, value) if value else default

    def switch(self, name: str) -> bool:
        value = self._environ.get(name, "")
        if value not in {"", "0", "1"}:
            self.problems.append(f"{name} is {value!r}, expected 0 or 1")
        return value == "1"

    def _number(self, name: str, value: str) -> int:
        if value.isascii() and value.isdigit() and len(value) < 19:
            return int(value)
        self.problems.append(f"{name} is {value!r}, expected a whole number >= 0")
        return 0


def wants_portable(environ: Mapping[str, str] | None = None) -> bool:
    """Whether `BRAID_PORTABLE` asks for copies instead of shared memory, whoever started this process.

    Args:
        environ: The environment; that of this process when None.

    Raises:
        ConfigError: It is neither 0 nor 1.
    """
    reader = _Reader(os.environ if environ is None else environ)
    portable = reader.switch("BRAID_PORTABLE")
    _refuse(reader.problems)
    return portable


def _network_problems(told: JobEnvironment) -> list[str]:
    problems = []
    if told.listen:
        try:
            everywhere = ipaddress.ip_address(told.listen).is_unspecified
        except ValueError:
            found, everywhere = f"{told.listen!r}, expected an IP address of this host", False
            problems.append(f"BRAID_LISTEN is {found}")
        if everywhere:  # ranks tell each other this address, and it leads nowhere
            problems.append(f"BRAID_LISTEN is {told.listen}, expected one address, not all of them")
    if told.secret_file and told.insecure_network:
        problems.append("BRAID_SECRET_FILE and BRAID_INSECURE_NETWORK exclude each other")
    return problems


def _refuse(problems: list[str]) -> None:
    if problems:
        msg = (
            f"the launcher's environment cannot work: {'; '.join(problems)}. Start the program "
            "with "
            "`braid run -n N script.py` or torchrun, or unset RANK and WORLD_SIZE to run it alone"
        )
        raise ConfigError(msg)
