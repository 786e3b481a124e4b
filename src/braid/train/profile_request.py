"""The options of `braid profile`: one frozen value that every rank gets as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from braid.errors import below, raise_all
from braid.runtime.option_types import (
    DeviceName,
    DtypeName,
    Number,
    NumRanks,
    Target,
    Text,
)

__all__ = ["ProfileRequest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileRequest:
    """Model to measure, how, and where to write the profile.

    Attributes:
        target: Module and function; or a file and function, such as train.py:make.
        num_ranks: Number of ranks of this host that measure at once, for `braid plan
            --profile`; also their messages, collectives and optimizer (default: this process
            alone).
        servers: Measure a parameter server, too, with as many servers as the N workers.
        model: A GPT of `braid train` in its place, such as gpt2-tiny or gpt2-medium.
        context: Bytes of a sequence, with --model.
        rows: Rows of the micro-batches to measure with; two or more numbers.
        seconds: Seconds to measure for, after first rounds.
        threads: Threads to measure with, as a rank has them.
        out: File for the profile.
        graph: File for PipeDream's graph of the largest micro-batch.
        picture: File for a picture of the layers, coloured by their time.
        device: Device of --model, as for `braid train`. A model of your own stays where FUNCTION
            puts it.
        dtype: Dtype of the matrix products of --model: fp32, or bf16 by autocast.
    """

    target: Target = ""
    num_ranks: NumRanks = None
    servers: bool = False
    model: Text = ""
    context: int = 128
    rows: tuple[int, ...] = (2, 8)
    seconds: float = 4.0
    threads: Number = 1
    out: str = "profile.json"
    graph: Text = ""
    picture: Text = ""
    device: DeviceName = "auto"
    dtype: DtypeName = "fp32"

    def __post_init__(self) -> None:
        problems = []
        if bool(self.target) == bool(self.model):
            problems.append("give a model: MODULE:FUNCTION, or --model NAME")
        if self.num_ranks is not None:
            problems += below(1, **{"-n": self.num_ranks})
        if self.servers and (self.num_ranks is None or self.num_ranks < 2):
            problems.append("--servers measures workers together: add -n 2, or another number")
        if self.target and (self.device, self.dtype) != ("auto", "fp32"):
            problems.append(
                "--device and --dtype are of --model: choose both where "
                f"{self.target} makes its model"
            )
        raise_all(problems)
