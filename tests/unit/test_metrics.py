"""Logged numbers: what a row takes, what is refused by name, and what readers make of the files."""

from __future__ import annotations

import errno
import io
import json
import math
import resource
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from braid.errors import ConfigError
from braid.launch.observe import read_run
from braid.runtime.clock import VirtualClock
from braid.runtime.events import Recorder
from braid.runtime.metrics import (
    Backlog,
    MetricRows,
    MetricsFiles,
    MetricsReader,
    RunMetrics,
    average_rows,
    has_writer,
    read_metrics,
    row_of,
)
from braid.runtime.rendezvous import JobEnvironment
from braid.runtime.store import HashStore, Store


def test_numbers_of_python_numpy_and_torch_become_a_row():
    values = {
        "loss": torch.tensor([0.5], requires_grad=True),
        "count": np.int64(3),
        "bf16": torch.tensor(2.0, dtype=torch.bfloat16),
        "flag": True,
        "nan": math.nan,
        "inf": torch.tensor(math.inf),
    }
    assert row_of(np.int32(7), values, {"time_s": 1.5}) == {
        "step": 7, "time_s": 1.5, "loss": 0.5, "count": 3, "bf16": 2.0, "flag": True, "nan": None, "inf": None,
    }  # fmt: skip


def test_all_that_is_wrong_with_a_row_is_named_at_once():
    values = {
        "losses": torch.ones(2, 3),
        "name": "adam",
        "none": None,
        "rss_bytes": 1,
        "a\nb": 1,
        "many": [1, 2],
    }
    with pytest.raises(ConfigError) as caught:
        row_of(-1, values, {})
    assert str(caught.value) == (
        "cannot log: step must be an integer of at least 0, got -1; "
        "losses must be one number, got a Tensor of shape (2, 3): log its mean or sum; "
        "name must be one number, got 'adam'; none must be one number, got None; "
        "rss_bytes is reserved for braid's own measurements: choose another name; "
        "'a\\nb' is not a valid name: use 1 to 80 printable characters; many must be one number, got [1, 2]"
    )


@pytest.mark.parametrize("step", [True, 1.0, "3", torch.tensor(1.5), 1 << 60])
def test_a_step_that_is_no_integer_is_refused(step):
    with pytest.raises(ConfigError, match="step must be an integer of at least 0"):
        row_of(step, {}, {})


def test_a_number_beyond_those_of_floats_is_refused_by_name_and_a_large_one_is_a_float():
    assert row_of(0, {"params": 1 << 70, "low": -(1 << 63)}, {}) == {
        "step": 0,
        "params": 2.0**70,
        "low": -(2.0**63),
    }
    with pytest.raises(ConfigError) as caught:
        row_of(0, {"huge": 10**400, "huger": Fraction(-(10**5000))}, {})
    assert str(caught.value) == (
        "cannot log: huge is beyond the largest float, 1.8e308: log its logarithm; "
        "huger is beyond the largest float, 1.8e308: log its logarithm"
    )


def test_a_file_with_a_number_beyond_those_of_floats_is_read(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(
        '{"step": 1, "loss": 1'
        + "0" * 400
        + "}\n"
        + '{"step": 1, "loss": 1'
        + "0" * 5000
        + "}\n"
        + '{"step": 2, "loss": 1}\n'
    )
    rows = read_metrics(path)
    assert rows is not None
    assert rows.rows == ({"step": 1, "loss": math.inf}, {"step": 2, "loss": 1})


def test_too_many_values_are_refused():
    with pytest.raises(ConfigError, match="201 values exceed the limit of a row, 200"):
        row_of(0, {f"x{i}": i for i in range(201)}, {})


def test_averages_are_over_the_ranks_that_have_logged_a_value(tmp_path):
    with MetricsFiles(tmp_path, VirtualClock()) as files:
        files.append(0, {"step": 1, "loss": 1.0})
        files.append(1, {"step": 1, "loss": 3.0, "only": 5.0})
        files.append(0, {"step": 0, "loss": 8.0})
        files.append(1, {"step": 2, "loss": None})
        files.append(0, {"step": 2, "loss": 1.0})
        files.append(0, {"step": 1, "loss": 2.0})  # a step that was done again
    read = [read_metrics(tmp_path / "metrics" / f"rank{rank}.jsonl") for rank in (0, 1)]
    rows = average_rows(file for file in read if file is not None)
    assert rows[:2] == ({"step": 0, "loss": 8.0}, {"step": 1, "loss": 2.5, "only": 5.0})
    assert math.isnan(rows[2]["loss"])


def test_torn_lines_and_files_without_steps_are_passed_over(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"model": "tiny"}\n{"step": 1, "loss": 2}\n\xff\xfe\n[1]\n{"step": 2, "lo')
    rows = read_metrics(path)
    assert rows is not None
    assert (rows.rows, rows.about) == (({"step": 1, "loss": 2},), {"model": "tiny"})
    path.write_text("{}\n")
    assert read_metrics(path) is None


def test_a_growing_file_is_read_line_by_line(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"model": "tiny"}\n{"step": 1, "loss": 2}\n{"step": 2, "lo')
    reader = MetricsReader(path)
    reader.refresh()
    assert reader.rows() == MetricRows(({"step": 1, "loss": 2},), {"model": "tiny"})
    text = path.read_text()
    path.write_text("#" * (len(text) - len('{"step": 2, "lo')) + '{"step": 2, "loss": 1}\n')
    reader.refresh()  # of what was read before, nothing is read again
    assert reader.rows(after=1) == MetricRows(({"step": 2, "loss": 1},), {"model": "tiny"})


def test_rows_that_a_full_disk_refuses_are_written_later(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsFiles(tmp_path, VirtualClock()) as files:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
            files.append(0, {"step": 1, "loss": 0.5})  # 22 bytes
        except OSError as exc:
            refused = exc.strerror
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        files.append(0, {"step": 2, "loss": 0.25})
    written = read_metrics(tmp_path / "metrics" / "rank0.jsonl")
    assert refused == "File too large"
    assert written.rows == ({"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25})


def test_a_refused_write_is_tried_again_once_a_second_and_at_the_end():
    clock, tries, written = VirtualClock(), [], []

    def refuse(data: bytes) -> int:
        tries.append(clock.now_ns())
        raise OSError(errno.ENOSPC, "No space left on device")

    def write(data: bytes) -> int:
        written.append(data[:3])
        return len(data[:3])

    backlog = Backlog(clock)
    for _ in range(10):
        backlog.append(b"line\n")
        with suppress(OSError):
            backlog.flush(refuse)
        clock.sleep(0.3)
    assert tries == [0, 1_200_000_000, 2_400_000_000]
    backlog.close(write, "x")
    assert b"".join(written) == 10 * b"line\n"


def test_at_most_a_mebibyte_is_kept_and_lost_lines_are_counted(messages):
    backlog, written = Backlog(VirtualClock()), io.BytesIO()
    lines = [b"%04d" % number + 1019 * b"." + b"\n" for number in range(1030)]
    for line in lines:
        backlog.append(line)
    backlog.close(written.write, "x")
    assert written.getvalue() == b"".join([lines[0], *lines[7:]])
    assert messages == ["lines that could not be written to x are lost: 6"]


def test_a_file_has_a_writer_until_it_is_closed(tmp_path):
    with (
        MetricsFiles(tmp_path, VirtualClock()) as files,
        MetricsFiles(tmp_path, VirtualClock()) as more,
    ):
        files.append(0, {"step": 1})
        more.append(0, {"step": 2})
        path = tmp_path / "metrics" / "rank0.jsonl"
        assert has_writer(path)
        files.close()
        assert has_writer(path)
    assert not has_writer(path)
    assert has_writer(tmp_path / "missing")  # nobody can know it


def _metrics(environment: JobEnvironment, store: Store | None = None) -> RunMetrics:
    clock = VirtualClock(0)
    return RunMetrics(environment, None, clock, Recorder(clock=clock), store or HashStore())


def _torchrun(rank: int) -> JobEnvironment:
    """A rank of four on two hosts, whose parent process has a number that any container has."""
    return JobEnvironment(
        rank=rank,
        world_size=4,
        local_rank=rank % 2,
        local_world_size=2,
        run_id="none",
        master_addr="localhost",
        master_port=29500,
        launched_by="torchrun",
    )


def test_ranks_of_a_run_without_launcher_share_a_directory_that_no_other_run_has(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for loss in (1, 2):
        store = HashStore()
        for rank in (3, 1):  # neither is the first of its host
            metrics = _metrics(_torchrun(rank), store)
            metrics.log(0, {"loss": loss})
            metrics.close()
    runs = [read_run(path) for path in (tmp_path / "runs").iterdir()]
    assert sorted(run.metrics[0]["loss"] for run in runs) == [1, 2]
    assert [(run.record.num_ranks, sorted(run.rank_metrics)) for run in runs] == [(4, [1, 3])] * 2
    assert [sorted(p.name for p in run.path.iterdir()) for run in runs] == [
        ["metrics", "run.json"]
    ] * 2


def test_a_rank_without_launcher_has_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    metrics = _metrics(JobEnvironment())
    metrics.log(None, {"loss": 2})
    metrics.log(None, {"loss": 1})
    metrics.log(9, {"loss": 0.5})
    metrics.close()
    (directory,) = (tmp_path / "runs").iterdir()
    run = read_run(directory)
    assert [(row["step"], row["loss"]) for row in run.metrics] == [(0, 2), (1, 1), (9, 0.5)]
    assert run.record.num_ranks == 1
    line = (directory / "metrics" / "rank0.jsonl").read_text().splitlines()[0]
    assert list(json.loads(line)) == [
        "step",
        "time_s",
        "unix_s",
        "rss_bytes",
        "peak_rss_bytes",
        "loss",
    ]


def test_a_directory_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").write_text("a file")
    with pytest.raises(ConfigError, match="cannot write numbers to runs"):
        _metrics(JobEnvironment()).log(0, {"loss": 1})
