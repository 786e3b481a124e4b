"""`braid.save` and `braid.load`: a loop of one's own goes on to the bit, whatever wraps the model."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import braid
from braid import DistributedDataParallel, cli
from braid.comm import Group
from braid.errors import CheckpointError, ConfigError
from braid.parallel import resume


class Loop:
    """A training with dropout, momentum, a scheduler and numbers from three generators."""

    def __init__(self, group: Group, *, wrap: bool = True) -> None:
        random.seed(group.rank)
        np.random.seed(group.rank)
        torch.manual_seed(0)
        self.group = group
        self.plain = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        torch.manual_seed(group.rank)
        self.model = (
            DistributedDataParallel(self.plain, process_group=group) if wrap else self.plain
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def parts(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self, begin: int, end: int) -> None:
        for _ in range(begin, end):
            x = torch.randn(4, 6) * random.random() + float(np.random.rand())
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def values(self) -> list[torch.Tensor]:
        own = [torch.tensor([random.random(), np.random.rand()]), torch.rand(2)]
        return [p.detach().clone() for p in self.plain.parameters()] + own


def _whole(group: Group, directory: str) -> list[torch.Tensor]:
    loop = Loop(group)
    assert resume.load(directory, group=group, **loop.parts()) == 0
    loop.train(0, 3)
    resume.save(directory, group=group, step=2, **loop.parts())
    loop.train(3, 6)
    return loop.values()


def _second_half(group: Group, directory: str) -> list[torch.Tensor]:
    loop = Loop(group)
    loop.train(0, 1)  # which the checkpoint undoes
    begin = resume.load(directory, group=group, **loop.parts())
    assert begin == 3
    loop.train(begin, 6)
    return loop.values()


@pytest.mark.procs
def test_a_resumed_loop_ends_with_the_same_bits_and_random_numbers(procs, tmp_path):
    for size in (1, 3):
        directory = str(tmp_path / str(size))
        whole = procs(size, _whole, directory)
        resumed = procs(size, _second_half, directory)
        for mine, theirs in zip(whole, resumed, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _model_only(group: Group, directory: str) -> list[torch.Tensor]:
    loop = Loop(group, wrap=False)
    assert resume.load(directory, group=group, model=loop.plain) == 3
    return [p.detach() for p in loop.plain.parameters()]


@pytest.mark.procs
def test_another_number_of_ranks_and_an_unwrapped_model_load_the_same_weights(procs, tmp_path):
    procs(2, _whole, str(tmp_path))
    (one,) = procs(1, _model_only, str(tmp_path))
    three = procs(3, _model_only, str(tmp_path))
    assert all(torch.equal(a, b) for values in three for a, b in zip(one, values, strict=True))


def _save_plain(group: Group, directory: str, **parts: object) -> Path:
    return resume.save(directory, group=group, model=_linear(), step=7, **parts)


def _linear(rows: int = 3) -> nn.Module:
    layer = nn.Linear(2, rows, bias=False)
    nn.init.constant_(layer.weight, 0.5)
    return layer


@pytest.mark.procs
def test_what_does_not_fit_is_refused_by_name_on_all_ranks(procs, tmp_path):
    procs(2, _refusals, str(tmp_path))


@pytest.mark.parametrize("call", [resume.save, resume.load])
def test_parts_of_which_ranks_have_other_pieces_are_refused(world, tmp_path, call):
    def main(group: Group) -> None:
        whole = nn.utils.skip_init(nn.Linear, 2, 3)
        model = braid.FullyShardedDataParallel(whole, group, init_sync=False)
        second = torch.optim.AdamW(model.parameters())
        options = {"step": 0} if call is resume.save else {}
        for whose in (model, nn.utils.skip_init(nn.Linear, 1, 1)):
            parts = {"second": second, "teacher": whole}
            with pytest.raises(
                ConfigError, match="second, teacher: each rank has different shards"
            ):
                call(str(tmp_path), group=group, model=whose, **parts, **options)

    world(2, main)


def _refusals(group: Group, directory: str) -> None:
    _save_plain(group, directory)
    with pytest.raises(ConfigError, match=r"sampler have no state_dict\(\): pass objects"):
        _save_plain(group, directory, sampler=3)
    parts = {"scheduler": torch.optim.SGD(_linear().parameters())}
    with pytest.raises(CheckpointError, match="has no state of scheduler, only of model and"):
        resume.load(directory, group=group, model=_linear(), **parts)
    with pytest.raises(CheckpointError, match="model/weight"):
        resume.load(directory, group=group, model=_linear(4))
    with pytest.raises(CheckpointError, match="has no readable checkpoint"):
        resume.load(f"{directory}/step-00000008", group=group, model=_linear())


def _passes_over(group: Group, directory: str) -> tuple[int, list[str]]:
    _save_plain(group, directory)
    newest = resume.save(directory, group=group, model=_linear(), step=9)
    if group.rank == 0:
        (newest / "manifest.json").write_text("{}")
    group.barrier()
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("braid.parallel.resume").addHandler(handler)
    try:
        return resume.load(directory, group=group, model=_linear()), texts
    finally:
        logging.getLogger("braid.parallel.resume").removeHandler(handler)


@pytest.mark.procs
def test_a_damaged_checkpoint_that_is_passed_over_is_one_line_on_rank_0(procs, tmp_path):
    (begin, (text,)), (other, texts) = procs(2, _passes_over, str(tmp_path))
    assert (begin, other, texts) == (8, 8, [])
    assert text.startswith(f"braid: skipped the unusable checkpoint {tmp_path / 'step-00000009'}: ")


@pytest.mark.procs
def test_the_model_is_exported_for_other_programs(procs, tmp_path, capsys):
    procs(2, _save_plain, str(tmp_path / "checkpoints"))
    out = tmp_path / "elsewhere" / "model.safetensors"
    assert cli.main(["checkpoint", "export", str(tmp_path), str(out)]) == 1
    assert f"cannot write {out}: No such file or directory" in capsys.readouterr().err
    out.parent.mkdir()
    assert cli.main(["checkpoint", "export", str(tmp_path), str(out)]) == 0
    assert {name: t.tolist() for name, t in load_file(out).items()} == {"weight": [[0.5, 0.5]] * 3}
    capsys.readouterr()
    assert cli.main(["checkpoint", "export", str(tmp_path), str(out)]) == 1
    assert "the file exists; choose another name" in capsys.readouterr().err
    assert cli.main(["checkpoint", "export", str(tmp_path / "none"), str(out)]) == 1
    assert f"{tmp_path / 'none'} is not a checkpoint" in capsys.readouterr().err


KILLED = """
import os, signal, braid
from torch import nn
group = braid.init()
model = nn.Linear(2, 3, bias=False)
assert braid.load("checkpoints", model=model) == 8
group.barrier()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.launcher
@pytest.mark.parametrize("asked", ["", "checkpoints/step-00000007"])
def test_a_run_that_is_killed_before_its_first_save_says_how_to_go_on(tmp_path, monkeypatch, asked):
    monkeypatch.chdir(tmp_path)
    try:
        resume.save("checkpoints", group=braid.init(), model=_linear(), step=7)
    finally:
        braid.shutdown()
    Path("train.py").write_text(KILLED)
    words = ["--resume", asked] if asked else []
    # a process of its own: it ends all of its descendants, which are the pool's processes here
    command = [sys.executable, "-m", "braid", "run", "--log-dir", "logs", *words, "train.py"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 137
    err = ended.stderr
    assert "  saved    checkpoint step 7 of an earlier run (sha256 ok)" in err
    line = f"braid run --resume {asked or 'auto'} -n 1 --log-dir logs train.py"
    assert f"  resume   {line}\n" in err


def test_a_missing_checkpoint_is_refused_before_ranks_start(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('started')")
    assert cli.main(["run", "--resume", "nowhere", "train.py"]) == 2
    out, err = capfd.readouterr()
    assert "nowhere does not exist, so it cannot be resumed: give a checkpoint" in " ".join(
        err.split()
    )
    assert out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


class _Tied(nn.Module):
    """A head that is the embedding, and a norm under two names, with its buffers."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.token = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.token.weight
        self.norm = nn.BatchNorm1d(3)
        self.again = self.norm
        nn.init.constant_(self.token.weight, value)
        self.norm.running_mean.fill_(value)


def _save_tied(group: Group, directory: str) -> None:
    resume.save(directory, group=group, step=1, model=_Tied(0.5))
    other = _Tied(0.0)
    resume.load(directory, group=group, model=other)
    assert other.head.weight.eq(0.5).all()


@pytest.mark.procs
def test_tied_tensors_are_exported_under_each_of_their_names(procs, tmp_path):
    procs(2, _save_tied, str(tmp_path / "checkpoints"))
    out = tmp_path / "model.safetensors"
    assert cli.main(["checkpoint", "export", str(tmp_path / "checkpoints"), str(out)]) == 0
    plain = _Tied(0.0)
    plain.load_state_dict(load_file(out))
    assert plain.head.weight is plain.token.weight
    assert plain.again.running_mean.eq(0.5).all()
    assert plain.head.weight.eq(0.5).all()
    with safe_open(out, "pt") as file:  # Hugging Face refuses a file without it
        assert file.metadata() == {"format": "pt"}


def test_the_root_names_are_these():
    assert (braid.save, braid.load) == (resume.save, resume.load)
