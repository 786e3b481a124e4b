"""MultiWorkerMirroredStrategy: processes of a group, of `braid run`, and of TF_CONFIG."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import skip_init

from braid.comm import Group
from braid.errors import ConfigError
from braid.strategies import MirroredStrategy, MultiWorkerMirroredStrategy, Strategy, fit

PROGRAM = """
import hashlib, sys, torch
from torch import nn
from torch.nn import functional
from braid import strategies
from braid.strategies import MirroredStrategy, MultiWorkerMirroredStrategy

torch.set_num_threads(1)
strategy = eval(sys.argv[1])
with strategy.scope():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

def step(x, y):
    optimizer.zero_grad()
    functional.mse_loss(model(x), y).backward()
    optimizer.step()

xs = [torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i in range(5)]
for batch in strategy.experimental_distribute_dataset([(x, x.sum(1, keepdim=True)) for x in xs]):
    strategy.run(step, args=batch)
raw = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("digest", strategy.num_replicas_in_sync, hashlib.sha256(raw).hexdigest(), flush=True)
"""


def digests(text: str) -> list[str]:
    return [line.partition("digest ")[2] for line in text.splitlines() if "digest" in line]


def outputs(commands: list[list[str]], environs: list[dict[str, str]], cwd: Path) -> str:
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, **environ},
            cwd=cwd,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for command, environ in zip(commands, environs, strict=True)
    ]
    texts = [process.communicate(timeout=100)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), texts
    return "\n".join(texts)


@pytest.mark.launcher
def test_one_line_changes_where_replicas_run_and_no_bit(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    python, several = [sys.executable, str(script)], "MultiWorkerMirroredStrategy()"
    mirrored = outputs([[*python, "MirroredStrategy(['cpu', 'cpu'])"]], [{}], tmp_path)
    run = [sys.executable, "-m", "braid", "run", "-n", "2", str(script), several]
    launched = outputs([run], [{}], tmp_path)
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    cluster = {"worker": [f"localhost:{port}", f"localhost:{port + 1}"]}
    configs = [
        json.dumps({"cluster": cluster, "task": {"type": "worker", "index": i}}) for i in range(2)
    ]
    environs = [{"TF_CONFIG": config} for config in configs]
    configured = outputs([[*python, several]] * 2, environs, tmp_path)
    (expected,) = digests(mirrored)
    assert expected.startswith("2 ")
    assert digests(launched) == digests(configured) == [expected] * 2


def _trained(group: Group, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    strategy = MultiWorkerMirroredStrategy(device="cpu", group=group)
    return _train(strategy, sizes)


def _train(strategy: Strategy, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)  # the default one is common to threads
    with strategy.scope():
        layers = [skip_init(nn.Linear, 3, 4), nn.BatchNorm1d(4), skip_init(nn.Linear, 4, 1)]
        model = nn.Sequential(*layers)
        for param in model.parameters():
            nn.init.uniform_(param, generator=generator)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        return loss.detach()

    data = [torch.randn(size, 3, generator=generator) for size in sizes]
    losses = [
        strategy.reduce("mean", strategy.run(step, args=(batch,)))
        for batch in strategy.experimental_distribute_dataset(data)
    ]
    return [*(x.detach() for x in model.state_dict().values()), *losses]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_workers_have_the_bits_of_mirrored_replicas(world, size):
    sizes = (6, 9, 7)
    strategy = MirroredStrategy(["cpu"] * size)
    expected = _train(strategy, sizes)
    strategy.close()
    for found in world(size, _trained, sizes):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def ones() -> nn.Module:
    model = skip_init(nn.Linear, 2, 1)
    for param in model.parameters():
        nn.init.ones_(param)
    return model


def _differs(group: Group, end: str) -> str:
    strategy = MultiWorkerMirroredStrategy(device="cpu", group=group)
    with strategy.scope():
        model = ones()

    def step() -> None:
        with torch.no_grad():
            model.weight.add_(group.rank)

    strategy.run(step)
    last = (lambda: strategy.run(lambda: None)) if end == "run" else strategy.close
    with pytest.raises(ConfigError, match="weight differ between replicas after step 1"):
        last()
    return "refused"


def _differs_late(group: Group) -> str:
    strategy = MultiWorkerMirroredStrategy(device="cpu", group=group)
    with strategy.scope():
        model = ones()

    def step(amount: int) -> None:
        with torch.no_grad():
            model.weight.add_(amount)

    for number in range(1, 21):
        strategy.run(step, args=(group.rank if number == 11 else 0,))
    with pytest.raises(ConfigError, match="weight differ between replicas after step 20"):
        strategy.run(step, args=(0,))
    return "refused"


def test_workers_that_become_different_later_are_refused_soon(world):
    assert world(2, _differs_late) == ["refused"] * 2


@pytest.mark.parametrize("end", ["run", "close"])
def test_workers_that_become_different_are_refused_in_the_next_step_or_at_the_end(world, end):
    assert world(2, _differs, end) == ["refused"] * 2


def _skips(group: Group) -> str:
    strategy = MultiWorkerMirroredStrategy(device="cpu", group=group)
    with strategy.scope():
        model = ones()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(skip: bool) -> None:
        optimizer.zero_grad()
        if not (skip and group.rank):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    strategy.run(step, args=(False,))
    strategy.run(step, args=(True,))
    if group.rank:  # the other one meets this one's next step in its backward, and then nobody
        with pytest.raises(ConfigError, match="differ between replicas after step 2"):
            strategy.run(step, args=(False,))
    return "refused"


def test_a_worker_that_skips_a_step_is_refused_in_the_next_one(world):
    assert world(2, _skips) == ["refused"] * 2


def _fitted(group: Group) -> list[dict[str, float]]:
    strategy = MultiWorkerMirroredStrategy(device="cpu", group=group)
    return _fit(strategy)


def _fit(strategy: Strategy) -> list[dict[str, float]]:
    model, data = ones(), [(x, x.sum(1, keepdim=True)) for x in map(whole_numbers, (6, 5))]
    return fit(
        model,
        data,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=functional.mse_loss,
        epochs=2,
        strategy=strategy,
        validation=[data[1], (data[0][0][:1], data[0][1][:1])],
    )


def whole_numbers(size: int) -> torch.Tensor:
    return torch.arange(2.0 * size).view(size, 2) / size


def test_fit_has_the_same_results_in_all_workers(world):
    strategy = MirroredStrategy(["cpu", "cpu"])
    expected = _fit(strategy)
    strategy.close()
    assert expected[1]["validation_loss"] < expected[0]["validation_loss"]
    for found in world(2, _fitted):
        assert [results.keys() for results in found] == [results.keys() for results in expected]
        for results, others in zip(found, expected, strict=True):
            assert list(results.values()) == pytest.approx(list(others.values()))


def _reads_too_little(group: Group) -> str:
    strategy = MultiWorkerMirroredStrategy(device="cpu", group=group)
    count = 2 + group.rank
    data = strategy.distribute_datasets_from_function(
        lambda context: [torch.ones(context.input_pipeline_id + 1)] * count
    )
    counts = []
    with pytest.raises(ConfigError, match="the data of worker 0 ended after 2 batches"):
        counts += [batch.samples for batch in data]
    gathered = strategy.gather(torch.full((group.rank + 1,), float(group.rank)), 0)
    assert gathered.tolist() == [0.0, 1.0, 1.0]
    return "refused"


def test_data_that_end_earlier_in_one_worker_are_an_error_in_all(world):
    assert world(2, _reads_too_little) == ["refused"] * 2
