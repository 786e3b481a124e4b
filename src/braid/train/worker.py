"""The program that each rank of `braid train` runs: `python -m braid.train.worker CONFIG_AS_JSON`.

The launcher passes the rank and the checkpoint to resume from in the environment. The
configuration is the only argument.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from braid import context
from braid.checkpoint import load, ls
from braid.comm import Group
from braid.errors import ConfigError
from braid.runtime.rendezvous import Loaded, Saved
from braid.runtime.rendezvous.membership import Membership
from braid.train.config import TrainConfig, checkpoints_in
from braid.train.corpus import from_files, standard_library
from braid.train.device import choose_device, compute_deterministically
from braid.train.elastic import train_elastically
from braid.train.loop import Stopping, Trainer
from braid.train.reports import Reporter
from braid.train.server_loop import train_on_servers

__all__ = ["main", "run"]

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(arguments: list[str]) -> int:
    """Run one rank of `braid train`; return the exit code.

    `arguments` has one text: the configuration as JSON.
    """
    if len(arguments) != 1:
        msg = (
            "a worker of `braid train` takes one argument, the configuration as JSON, got "
            f"{len(arguments)}: use `braid train`"
        )
        raise ConfigError(msg)
    config = TrainConfig.from_json(arguments[0])
    stopping = Stopping()
    for number in () if config.min_ranks else SIGNALS:  # else the elastic training handles them
        signal.signal(number, stopping)
    compute_deterministically()
    signum = run(config, context.init(), stopping, context.membership())
    context.shutdown()  # not after an exception: other ranks must see a failed rank
    return 128 + signum if signum else 0


def run(config: TrainConfig, group: Group, stopping: Stopping, member: Membership) -> int:
    """Train on this rank; return the signal that ended the training early, or 0."""
    corpus = from_files(config.data) if config.data else standard_library()
    here, helpers = member.environment, config.num_helpers  # helpers have the first ranks
    place = choose_device(
        config.device, max(0, here.local_rank - helpers), here.local_world_size - helpers
    )
    if group.rank >= helpers:
        place.make_current()
    if config.min_ranks:
        train_elastically(config, corpus, place, group.context.clock)
        return 0
    if config.strategy:
        return train_on_servers(config, corpus, group, stopping, member, place)
    metrics = Path(config.log_dir) / "metrics.jsonl" if group.rank == 0 else None
    with Reporter(metrics, sys.stdout, group.context.clock) as reporter:
        trainer = Trainer(config, corpus, group, reporter, stopping, place)

        def report_saved(step: int, path: Path, sha256_ok: bool) -> None:
            if member.control is not None and group.rank == 0:
                member.control.send(Saved(step, str(path), sha256_ok))

        trainer.on_saved = report_saved
        resumed_from, notes = _resume(trainer, config, member, group)
        return trainer.run(resumed_from=resumed_from, notes=notes)


def _resume(
    trainer: Trainer, config: TrainConfig, member: Membership, group: Group
) -> tuple[str, tuple[str, ...]]:
    """Load the checkpoint that `--resume` names; return its path and notes for the user."""
    where = member.environment.resume
    if not where:
        return "", ()
    if where == "auto" and not ls(config.checkpoints):
        return "", (f"no checkpoint in {config.checkpoints} yet, starting a new run",)
    loaded = load(checkpoints_in(config.checkpoints if where == "auto" else where), group=group)
    bad = {skipped.path for skipped in loaded.skipped}
    later = [
        line.path
        for line in ls(config.checkpoints)
        if line.step > loaded.manifest.step and line.path not in bad and not line.problem
    ]
    if later and loaded.path.resolve().parent == Path(config.checkpoints).resolve():
        msg = (
            f"{config.checkpoints} has {later[-1]}, which is later than the {loaded.path.name} "
            "that --resume names: use --resume auto, or another --log-dir for the new branch"
        )
        raise ConfigError(msg)
    trainer.resume(loaded)
    if member.control is not None and group.rank == 0:
        member.control.send(Loaded(loaded.manifest.step, str(loaded.path), where))
    notes = [f"skipped {path}: {reason}" for path, reason in loaded.skipped]
    then, now = loaded.manifest.numerics, trainer.numerics()
    del now["world_size"]  # the bits depend on the number of shards, not ranks
    del now["algorithms"]  # measured in every run; no choice changes the order of sums
    then = {"device": "cpu", "dtype": "fp32", **then}  # missing in older checkpoints
    if differing := [f"{k} {then.get(k)} (now {now[k]})" for k in now if then.get(k) != now[k]]:
        notes.append(f"last bits may differ, the checkpoint was made with {', '.join(differing)}")
    return str(loaded.path), tuple(notes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
