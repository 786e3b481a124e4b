"""Reports of a running training: one JSON object per line, in the metrics file and on stdout.

Rank 0 appends every report to `metrics.jsonl`, which has each step once, also after a resume. It
also prints some of the reports, so that `braid train` can draw a progress bar without another
channel.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import SEEK_END
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO, TypeAlias

import msgspec

from braid.errors import ConfigError
from braid.runtime.clock import Clock
from braid.runtime.metrics import Backlog
from braid.types import Shares

if TYPE_CHECKING:  # reports are read without torch
    from torch import Tensor

    from braid.train.config import TrainConfig
    from braid.train.corpus import Corpus
    from braid.train.device import RankDevice

__all__ = [
    "Checkpointed",
    "Evaluated",
    "Report",
    "Reporter",
    "Sampled",
    "Stepped",
    "TrainingFinished",
    "TrainingStarted",
    "parse_report",
]

LOG = logging.getLogger(__name__)

SHOW_NS = 200_000_000
MARK = b'{"kind":"'


class TrainingStarted(msgspec.Struct, tag_field="kind", tag="start", frozen=True, kw_only=True):
    """Report before the first step, with the model, the data and the ranks."""

    first_step: int
    steps: int
    num_ranks: int
    shards: int
    threads: int
    model: str
    num_params: int
    data: str
    num_files: int
    data_bytes: int
    tokens_per_step: int
    flops_per_step: int
    peak_flops_per_s: float
    torch: str
    peak_source: str = ""
    device: str = "cpu"
    dtype: str = "fp32"
    mesh: str = ""
    resumed_from: str = ""
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        corpus: Corpus,
        place: RankDevice,
        params: Iterable[Tensor],
        peak: tuple[float, str],
        **facts: Any,
    ) -> TrainingStarted:
        """Return the report of a training; `facts` has the fields that differ between trainers."""
        return cls(
            steps=config.steps,
            mesh=config.mesh,
            model=config.model,
            num_params=sum(param.numel() for param in params),
            data=corpus.name,
            num_files=corpus.num_files,
            data_bytes=len(corpus.train),
            tokens_per_step=config.batch * config.context,
            peak_flops_per_s=peak[0],
            peak_source=peak[1],
            device=place.name,
            dtype=config.dtype,
            **facts,
        )


class Stepped(
    msgspec.Struct, tag_field="kind", tag="step", frozen=True, kw_only=True, omit_defaults=True
):
    """Report of a completed step, with rank 0's time shares, MFU and memory."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    step_s: float
    tokens_per_s: float
    compute: float
    wait: float
    transfer: float
    mfu: float
    rss_bytes: int = 0
    peak_rss_bytes: int = 0
    cuda_bytes: int = 0
    cuda_peak_bytes: int = 0


class Evaluated(msgspec.Struct, tag_field="kind", tag="eval", frozen=True, kw_only=True):
    """Report of the loss on held-out text."""

    step: int
    eval_loss: float


class Checkpointed(msgspec.Struct, tag_field="kind", tag="checkpoint", frozen=True, kw_only=True):
    """Report that a checkpoint is complete, with the time during which training was blocked."""

    step: int
    path: str
    stall_s: float = 0.0
    write_s: float = 0.0


class Sampled(msgspec.Struct, tag_field="kind", tag="sample", frozen=True, kw_only=True):
    """Report with text that the model has generated."""

    step: int
    text: str


class TrainingFinished(msgspec.Struct, tag_field="kind", tag="end", frozen=True, kw_only=True):
    """Report of the end of the training; `stopped_by` is empty after the last step."""

    step: int
    first_loss: float
    last_loss: float
    seconds: float
    checkpoint: str
    shares: tuple[Shares, ...]
    stopped_by: str = ""


Report: TypeAlias = (
    TrainingStarted | Stepped | Evaluated | Checkpointed | Sampled | TrainingFinished
)

_DECODER = msgspec.json.Decoder(Report)


def parse_report(line: bytes) -> Report | None:
    """Parse a line of output as a report; None for any other line."""
    if not line.startswith(MARK):
        return None
    try:
        report: Report = _DECODER.decode(line)
    except msgspec.MsgspecError:
        return None
    return report


def _is_of_past(report: Report | None, step: int) -> bool:
    """Return whether a report is still valid when the training continues from `step`."""
    if isinstance(report, TrainingStarted):
        return report.first_step < step
    return report is None or report.step <= step


def _kind_and_step(report: Report | None) -> tuple[type, int]:
    return type(report), getattr(report, "step", -1)


@contextmanager
def _values_by_name(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        msg = f"metrics cannot be written to {path}: {exc.strerror}; choose another --log-dir"
        raise ConfigError(msg) from exc


def _is_incomplete(file: BinaryIO) -> bool:
    """Return whether the last line has no newline, as a killed rank has written only a part."""
    if not file.seek(0, SEEK_END):
        return False
    file.seek(-1, SEEK_END)
    return file.read(1) != b"\n"


class Reporter:
    """Writes reports to a file and to stdout; a context manager.

    Ranks other than 0 have a reporter that writes nothing. Lines that a full disk refuses are kept
    in a `Backlog`, and written with a later one or at the end.

    Args:
        path: Metrics file to append to; None to write nothing.
        out: Stream for lines that show progress.
        clock: Clock that decides when the next step is shown, and a refused write is tried again.

    Raises:
        ConfigError: The file cannot be opened.
    """

    def __init__(self, path: Path | None, out: TextIO, clock: Clock) -> None:
        self._out = out
        self._clock = clock
        self._shown_ns = 0
        self._file: BinaryIO | None = None
        self._unwritten = Backlog(clock)
        self._line_end = b""  # newline that the last line of the file lacks
        self._is_refused = False  # the last write has failed
        if path is None:
            return
        with _values_by_name(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+", buffering=0)
            self._line_end = b"\n" * _is_incomplete(self._file)

    def rewind(self, step: int) -> None:
        """Remove the reports of steps after `step` from the file; these steps will be repeated.

        The file is cut, which needs no space on a full disk. Late reports of earlier steps are
        written again.

        Raises:
            ConfigError: The file cannot be read or cut.
        """
        if self._file is None:
            return
        path = Path(self._file.name)
        with _values_by_name(path):
            written = path.read_bytes()
            kept = bytearray()
            end = -1  # of the lines before the first one that is removed
            for line in (written + bytes(self._unwritten)).splitlines(keepends=True):
                report = parse_report(line)
                if not _is_of_past(report, step):
                    end = len(kept) if end < 0 else end
                elif end < 0 or report is not None:
                    kept += line
            if end < 0:
                return
            end = min(end, len(written))
            self._file.truncate(end)
        self._line_end = b""
        self._unwritten.replace(bytes(kept[end:]).splitlines(keepends=True))
        self._write_file(self._file, at_once=True)

    def write_missing(self, reports: Iterable[Report], step: int, *, following: Report) -> None:
        """Write the reports that the file lacks, but for those that will come.

        Args:
            reports: Last reports before `following`.
            step: Step from which the training continues; reports of later steps are left out.
            following: Report that is written next.

        Raises:
            ConfigError: The file cannot be read.
        """
        if self._file is None:
            return
        path = Path(self._file.name)
        with _values_by_name(path):
            lines = (path.read_bytes() + bytes(self._unwritten)).splitlines()
        written = {_kind_and_step(report) for report in [following, *map(parse_report, lines)]}
        for report in reports:
            if _is_of_past(report, step) and _kind_and_step(report) not in written:
                self.write(report)

    def write(self, report: Report) -> None:
        """Write a report; `out` gets at most five steps per second, and all other reports."""
        if self._file is None:
            return
        line = msgspec.json.encode(report) + b"\n"
        self._unwritten.append(self._line_end + line)
        self._line_end = b""
        self._write_file(self._file)
        now_ns = self._clock.now_ns()
        if isinstance(report, Stepped) and now_ns - self._shown_ns < SHOW_NS:
            return
        self._shown_ns = now_ns
        self._out.write(line.decode())
        self._out.flush()

    def _write_file(self, file: BinaryIO, *, at_once: bool = False) -> None:
        try:
            self._unwritten.flush(file.write, at_once=at_once)
        except OSError as exc:
            if not self._is_refused:
                LOG.warning(
                    "metrics cannot be written to %s: %s; the training goes on, and writes them "
                    "when this is possible again",
                    file.name,
                    exc.strerror,
                )
        self._is_refused = bool(self._unwritten)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._file is not None:
            self._unwritten.close(self._file.write, self._file.name)
            self._file.close()
            self._file = None
