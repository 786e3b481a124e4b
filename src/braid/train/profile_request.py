"""The options of `braid profile`: one frozen value that is sent to every rank as JSON."""

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
    """Options of a profile: the model, the sizes to measure, and the files to write.

    Attributes:
        target: Module and function, such as mymodel:make; or file and function, such as
            train.py:make.
        num_ranks: Number of ranks of this host that measure at the same time, for `braid plan
            --profile`; also measures messages, collectives and the optimizer (default: measure
            the layers in this process).
        servers: Also measure a parameter server, with N servers for the N workers.
        model: A GPT of `braid train` instead of a target, such as gpt2-tiny or gpt2-medium.
        context: Bytes of a sequence, with --model.
        rows: Rows of the micro-batches to measure with; two or more numbers.
        seconds: Seconds to measure layers for, after warm-up rounds. With -n, some steps of
            training follow for each of the rows; the first of them may take longer.
        threads: Number of threads of each rank.
        out: File for the profile.
        graph: File for PipeDream's graph of the largest micro-batch.
        picture: File for a picture of the layers, coloured by their time.
        device: Device of --model, as for `braid train`. A target's model stays on the device that
            FUNCTION chooses.
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
            problems.append("no model is named: give MODULE:FUNCTION, or --model NAME")
        if self.num_ranks is not None:
            problems += below(1, **{"-n": self.num_ranks})
        if self.servers and (self.num_ranks is None or self.num_ranks < 2):
            problems.append("--servers needs at least 2 workers: add -n 2, or another number")
        if self.target and (self.device, self.dtype) != ("auto", "fp32"):
            problems.append(
                "--device and --dtype need --model: choose both where "
                f"{self.target} makes its model"
            )
        raise_all(problems)
