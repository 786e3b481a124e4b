"""Reads and checks the environment variables that a launcher sets for a rank.

Problem: if a job is started partly by hand, some of the launcher's variables are set and others are
missing. If each module reads its variables with a default, programs hang in their first collective,
or each process is rank 0.

Idea: read all variables at one place, and report all problems in one message. Variables have
torchrun's names, so braid runs under torchrun and torch programs run under braid.

Source: environment of `torchrun` (torch.distributed.elastic.multiprocessing, "Environment
Variables").
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass

from braid.errors import ConfigError
from braid.runtime.variables import FAULTS

__all__ = ["JobEnvironment", "wants_portable"]

CONTRACT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEnvironment:
    """Settings that a launcher passes to a rank.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks of the job.
        local_rank: Index of the rank on this host.
        local_world_size: Number of ranks on this host.
        node_rank: Number of this host.
        num_nodes: Number of hosts; 1 if unknown.
        run_id: Name of the run, the same on all ranks.
        master_addr: Host of rank 0, for `torch.distributed`; empty if unknown.
        master_port: Port for `torch.distributed` on `master_addr`; 0 if unknown.
        store_address: Address at which braid's launcher serves the store and control connections;
            empty without braid's launcher.
        secret_fd: Descriptor of the job's secret; None without braid's launcher.
        events_fd: Descriptor of the memory for this rank's events; None without braid's launcher.
        stacks_fd: Descriptor to which this rank dumps its stacks; None without braid's launcher.
        log_dir: Directory of the run's logs; empty if unknown.
        resume: Checkpoint to resume from (`auto`: the latest complete one); empty for a new start.
        launched_by: `braid`, `torchrun` (or a launcher with the same variables), `srun`, `mpirun`,
            `mpiexec`, `kubernetes`, or `single`.
        agent_store: Whether the launcher, instead of rank 0, serves torch's store on `master_port`.
        portable: Whether ranks send data in messages even where they could share memory.
        listen: IP address on which this rank listens for ranks of other hosts. Empty for a job on
            one host, or if the rank determines the address of its host that reaches `master_addr`.
        secret_file: File with the job's secret (mode 0600, see `Secret.from_file`), for several
            hosts without braid's launcher; empty if not set.
        insecure_network: Whether ranks of several hosts accept any connection, without a secret.
        debugged: Whether a debugger is used on one of the ranks, which disables the time-outs of
            collectives.
        elastic: Role of the process in an elastic run: `founder` if it is a member from the start,
            `newcomer` if it joins later; empty if members are fixed.
        replaces: Lost rank that this process replaces in its role, such as a server's or a
            worker's; -1 for none. The program sees it as `RANK`.
        takes_faults: Whether `braid chaos` runs the job: the rank logs digests of its weights, and
            flips bits in its gradients on a signal.
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
    debugged: bool = False
    elastic: str = ""
    replaces: int = -1
    takes_faults: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be {low} <= {name} < {high} ({bound}), got {value}"
            for name, value, low, high, bound in (
                ("RANK", self.place, 0, self.world_size, "WORLD_SIZE"),
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
    def parse(cls, environ: Mapping[str, str], engine: str = "") -> JobEnvironment:
        """Read the variables of a launcher; without them the process is the only rank of its job.

        Args:
            environ: Environment variables, such as `os.environ`.
            engine: Launcher that has started this process, if it is neither braid nor torchrun.

        Raises:
            ConfigError: A value is not a number, a rank is not below the world size, or a variable
                is missing; the message lists all problems.
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
        place = environ.get("BRAID_PLACE", "") if by_braid else ""
        for name, value, was in zip(CONTRACT, (rank, world_size), place.split("/"), strict=False):
            if place and str(value) != was:  # ranks would wait for a rank that does not exist
                reader.problems.append(
                    f"{name} must be {was}, as `braid run` set it, got {value}: do not change it"
                )
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
        debugged = reader.switch("BRAID_DEBUGGED")
        process = reader.optional("BRAID_PROCESS", -1)
        takes_faults = reader.switch(FAULTS)
        _refuse(reader.problems)
        return cls(
            rank=rank if process < 0 else process,
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
            launched_by="braid" if by_braid else engine or "torchrun",
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            portable=portable,
            listen=environ.get("BRAID_LISTEN", ""),
            secret_file=environ.get("BRAID_SECRET_FILE", ""),
            insecure_network=insecure_network,
            debugged=debugged,
            elastic=environ.get("BRAID_ELASTIC", ""),
            replaces=-1 if process < 0 else rank,
            takes_faults=takes_faults,
        )

    @classmethod
    def from_os(cls) -> JobEnvironment:
        """Read the environment of this process; no other module reads these variables.

        Under srun, mpirun and Kubernetes, torchrun's variables are also set in `os.environ`.

        Raises:
            ConfigError: Variables are missing, invalid, or contradict each other.
        """
        if os.environ.get("BRAID_STORE"):
            return cls.parse(os.environ)
        from braid.runtime.rendezvous import engine_job, engine_ranks  # noqa: PLC0415 - takes 5 ms

        job = engine_job.name_of_job() if "PMI_RANK" in os.environ else ""
        engine, values = engine_ranks.as_torchrun(os.environ, job, engine_job.shared_networks())
        if engine == "srun" and "MASTER_ADDR" in values:
            values["MASTER_ADDR"] = engine_job.address_of_node(values["MASTER_ADDR"])
        os.environ.update(values)
        return cls.parse(os.environ, engine)

    @property
    def place(self) -> int:
        """Value of `RANK` for the program: this process's rank, or the rank that it replaces."""
        return self.rank if self.replaces < 0 else self.replaces

    @property
    def has_torch_store(self) -> bool:
        """Whether ranks meet at torch's store, which the launcher or rank 0 serves."""
        return self.launched_by not in {"braid", "single"} and self.world_size > 1

    def to_environ(self) -> dict[str, str]:
        """Return the environment variables of these settings; the inverse of `parse`."""
        values = {
            "RANK": self.place,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "NODE_RANK": self.node_rank,
            "GROUP_RANK": self.node_rank,
            "GROUP_WORLD_SIZE": self.num_nodes,
            "ROLE_RANK": self.place,
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
            "BRAID_PLACE": f"{self.place}/{self.world_size}" if self.store_address else "",
            "BRAID_PORTABLE": "1" if self.portable else "",
            "BRAID_LISTEN": self.listen,
            "BRAID_SECRET_FILE": self.secret_file,
            "BRAID_INSECURE_NETWORK": "1" if self.insecure_network else "",
            "BRAID_DEBUGGED": "1" if self.debugged else "",
            "BRAID_ELASTIC": self.elastic,
            "BRAID_PROCESS": "" if self.replaces < 0 else self.rank,
            FAULTS: "1" if self.takes_faults else "",
        }
        return {name: str(value) for name, value in values.items() if value not in {None, ""}}


class _Reader:
    """Reads numbers from a mapping and collects the problems."""

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
            self.problems.append(f"{name} must be 0 or 1, got {value!r}")
        return value == "1"

    def _number(self, name: str, value: str) -> int:
        if value.isascii() and value.isdigit() and len(value) < 19:
            return int(value)
        self.problems.append(f"{name} must be an integer >= 0, got {value!r}")
        return 0


def wants_portable(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether `BRAID_PORTABLE` is 1: send messages instead of using shared memory.

    Args:
        environ: Environment variables; those of this process when None.

    Raises:
        ConfigError: The variable is neither 0 nor 1.
    """
    return _switch("BRAID_PORTABLE", environ)


def wants_frame_codes() -> bool:
    """Return whether frames between hosts are authenticated: yes, unless `BRAID_NO_FRAME_MAC` is 1.

    Raises:
        ConfigError: The variable is neither 0 nor 1.
    """
    return not _switch("BRAID_NO_FRAME_MAC")


def _switch(name: str, environ: Mapping[str, str] | None = None) -> bool:
    reader = _Reader(os.environ if environ is None else environ)
    switch = reader.switch(name)
    _refuse(reader.problems)
    return switch


def _network_problems(environment: JobEnvironment) -> list[str]:
    problems = []
    listen = environment.listen
    if listen:
        try:
            if ipaddress.ip_address(listen).is_unspecified:  # no rank can connect to this address
                problems.append(
                    f"BRAID_LISTEN must be the address of one network interface, got {listen}"
                )
        except ValueError:
            problems.append(f"BRAID_LISTEN must be an IP address of this host, got {listen!r}")
    if environment.secret_file and environment.insecure_network:
        problems.append(
            "BRAID_SECRET_FILE and BRAID_INSECURE_NETWORK exclude each other: unset one of them"
        )
    return problems


def _refuse(problems: list[str]) -> None:
    if problems:
        msg = (
            f"the launcher's environment is invalid: {'; '.join(problems)}. Start the program "
            "with `braid run -n N script.py` or torchrun, or unset RANK and WORLD_SIZE to run it "
            "alone"
        )
        raise ConfigError(msg)
