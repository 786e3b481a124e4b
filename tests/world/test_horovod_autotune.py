"""What remains of a search, wherever it ends."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import torch

import braid.compat.horovod.torch as hvd
from braid.comm import Group
from braid.compat.horovod import session
from braid.compat.horovod.environment import HorovodEnvironment

ROUNDS = 12  # of which each sample takes two


@contextlib.contextmanager
def searching(group: Group, log: str, samples: int) -> Iterator[None]:
    environment = HorovodEnvironment(
        autotune=True,
        autotune_log=log,
        autotune_warmup_samples=0,
        autotune_steps_per_sample=1,
        autotune_bayes_opt_max_samples=samples,
    )
    session.start(group, environment)
    try:
        yield
    finally:
        hvd.shutdown()


def _rounds(group: Group, log: str, samples: int) -> tuple[float, str]:
    total, said = 0.0, io.StringIO()
    with contextlib.redirect_stderr(said), searching(group, log, samples):
        for _ in range(ROUNDS):
            total += hvd.allreduce(torch.ones(1), name="x", op=hvd.Sum).item()
    return total, said.getvalue()


def test_training_goes_on_without_a_log_that_cannot_be_written(procs, tmp_path):
    first, second = procs(2, _rounds, str(tmp_path / "none" / "log.csv"), 2)
    assert first[0] == second[0] == 2.0 * ROUNDS
    assert "autotune's log cannot be written" in first[1]


def test_a_search_that_training_ends_is_written_as_far_as_it_came(procs, tmp_path):
    log = tmp_path / "log.csv"
    procs(2, _rounds, str(log), 1000)
    head, *samples, best = log.read_text().splitlines()
    assert head == "threshold_bytes,cycle_time_ms,bytes_per_s"
    assert len(samples) == ROUNDS // 2 - 1  # nothing comes again in the first round
    assert best.endswith(",best")


def _sets(group: Group, log: str) -> None:
    with searching(group, log, 1):
        own = hvd.add_process_set([1])
        for _ in range(ROUNDS):
            hvd.allreduce(torch.ones(1), name="x")
            if own.included():
                hvd.allreduce(torch.ones(1000), name="x", process_set=own)


def test_each_process_set_has_a_log_of_its_own(procs, tmp_path):
    procs(2, _sets, str(tmp_path / "log.csv"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.1.csv", "log.csv"]
