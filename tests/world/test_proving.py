"""`braid prove` proves what holds, and names the first parameter of what does not."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from braid.cli import main
from braid.comm import Group
from braid.train.prove import load_task, prove
from braid.train.prove.show import show

pytestmark = pytest.mark.procs

TASK = """
import braid, torch
from torch import nn

def model():
    generator = torch.Generator().manual_seed(0)
    found = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
    with torch.no_grad():
        for param in found.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return found

def loss(model, rank, size, step):
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    return model(x[rank::size]).square().mean()

def optimizer(params):
    return torch.optim.AdamW(params, lr=0.01)
"""
SLIPS = """
def wrap(model, group):
    wrapped = braid.DistributedDataParallel(model, process_group=group)
    def hook(state, bucket):
        yield group.all_reduce(bucket.buffer(), async_op=True)
        bucket.buffer().div_(group.size)
        bucket.gradients()[0].mul_(1.001)  # of the last parameter
    wrapped.register_comm_hook(None, hook)
    return wrapped

def optimizer(params):
    return torch.optim.SGD(params, lr=0.5)
"""


def _told(group: Group, file: str) -> str:
    """The words of a proof of three steps, on the first rank."""
    proof = prove(group, load_task(Path(file)), 3)
    out = io.StringIO()
    if proof is not None:
        show(proof, Console(file=out, width=300))
    return " ".join(out.getvalue().split())


@pytest.fixture
def proved(procs, tmp_path):
    """`proved(size, task)`: what is told of a task on so many ranks."""

    def prove_it(size: int, task: str) -> str:
        file = tmp_path / "task.py"
        file.write_text(task)
        return procs(size, _told, str(file))[0]

    return prove_it


@pytest.mark.parametrize("ranks", [2, 3])
def test_equal_bits_are_proved(proved, ranks):
    assert f"proved 3 steps on {ranks} ranks: all 6 parameters" in proved(ranks, TASK)


SHARDED = """
def wrap(model, group):
    return braid.FullyShardedDataParallel(model, group)
"""


def test_a_sharded_model_is_proved_whole(proved):
    assert "proved 3 steps on 2 ranks: all 6 parameters" in proved(2, TASK + SHARDED)


@pytest.mark.launcher
def test_a_slip_is_found_after_its_step_and_is_the_exit_code(tmp_path, capsys):
    file = tmp_path / "task.py"
    file.write_text(TASK + SLIPS)
    assert main(["prove", str(file), "--steps", "3", "--log-dir", str(tmp_path / "logs")]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "differs after step 1: 3.bias" in out
    assert "ulps apart" in out


@pytest.mark.proof
@pytest.mark.launcher
def test_the_command_proves_equal_bits(tmp_path, capsys):
    file = tmp_path / "task.py"
    file.write_text(TASK)
    told = ["prove", str(file), "-n", "2", "--steps", "3", "--log-dir", str(tmp_path / "logs")]
    assert main(told) == 0
    assert "proved 3 steps on 2 ranks" in " ".join(capsys.readouterr().out.split())


WRONG_SHARES = {
    "x[rank:]": "in step 1 the mean of the shares' losses is",
    "x[rank::size].repeat_interleave(2 - rank, 0)[: 7 - rank]": "of the whole batch is",
    "x[: 12 // size]": "wrong shares",
}


@pytest.mark.parametrize("share", WRONG_SHARES)
def test_wrong_shares_are_found_though_every_bit_is_equal(proved, share):
    out = proved(2, TASK.replace("x[rank::size]", share))
    assert "wrong shares in step 1" in out
    assert "cover the batch once (x[rank::size], not x[rank:])" in out
    assert WRONG_SHARES[share] in out
    assert "equal bits 3 steps on 2 ranks" in out
    assert "proved" not in out


def test_a_sum_is_not_the_mean_of_its_shares(proved):
    out = proved(3, TASK.replace(".mean()", ".sum()"))
    assert "wrong shares in step 1" in out


WEIGHTED = TASK.replace(
    "    return model(x[rank::size])",
    "    share = x[9 * rank : 9 + 3 * rank] if size == 2 else x\n"
    "    model.set_loss_weight(len(share))\n"
    "    return model(share)",
)


def test_unequal_shares_with_their_weights_are_proved(proved):
    out = proved(2, WEIGHTED)
    assert "proved 3 steps on 2 ranks" in out
    assert "wrong shares" not in out
    without = proved(2, WEIGHTED.replace("model.set_loss_weight(len(share))", "pass"))
    assert "wrong shares in step 1" in without
    assert "set model.set_loss_weight(len(share)) before their forward" in without


def test_a_batch_that_is_not_split_is_said_beside_the_verdict(proved):
    out = proved(2, TASK.replace("x[rank::size]", "x").replace("nn.Dropout(0.3)", "nn.Tanh()"))
    assert (
        "not split every share is the whole batch, so each of the 2 ranks does the work of one process"
        in out
    )
    assert "forward x[rank::size] and y[rank::size], not x and y" in out
    assert "proved 3 steps on 2 ranks" in out
    assert "not split" not in proved(1, TASK)


def _num_evaluations(group: Group, file: str) -> int:
    task = load_task(Path(file))
    evaluated = []

    def loss(model: nn.Module, rank: int, size: int, step: int) -> torch.Tensor:
        evaluated.extend([step] * (not model.training))
        return task.loss(model, rank, size, step)

    prove(group, replace(task, loss=loss), 5)
    return len(evaluated)


def test_shares_are_checked_in_the_first_two_steps(procs, tmp_path):
    file = tmp_path / "task.py"
    file.write_text(TASK)
    assert procs(2, _num_evaluations, str(file)) == [2 * (2 + 1), 0]


def test_a_model_that_cannot_be_evaluated_is_compared_bit_by_bit_only(proved):
    task = TASK.replace("    x = torch", "    assert model.training\n    x = torch")
    assert "proved 3 steps" in proved(2, task)


DRIFTS = {
    "unwrapped": """
def wrap(model, group):
    return model
""",
    "changed": """
def loss(model, rank, size, step):
    if rank == 1 and step == 1 and isinstance(model, braid.DistributedDataParallel):
        with torch.no_grad():
            model.module[3].bias.mul_(1.001)
    return model(torch.ones(2, 8)).square().mean()
""",
}


@pytest.mark.parametrize(("how", "step", "name"), [("unwrapped", 1, "0"), ("changed", 2, "3.bias")])
def test_ranks_that_drift_apart_are_a_difference(proved, how, step, name):
    out = proved(3, TASK + DRIFTS[how])
    assert f"differs after step {step}: {name}" in out
    assert "on rank 1 and " in out or how == "unwrapped"
    assert "on rank 0, " in out
    assert "ulps apart" in out
    assert "the ranks' parameters differ from each other" in out
