"""A training that one engine saves and another one continues ends like one process without a break."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import braid
from braid.comm import Group
from braid.errors import CheckpointError, ConfigError
from braid.parallel import sharding
from braid.parallel.hybrid import HybridParallel
from checkpoint_habits import KINDS, Scaled, problems
from engine_habits import Block

pytestmark = pytest.mark.procs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.* got no gradient")
def test_another_engine_continues_as_if_nothing_had_been(procs, tmp_path, kind):
    for found in procs(2, problems, kind, str(tmp_path)):
        assert not found, "\n".join(found)


class Counted:
    """An object with a state."""

    def __init__(self, count: int, x: torch.Tensor) -> None:
        self.count, self.x = count, x

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "x": self.x, "huge": float("inf")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["huge"] == float("inf")
        self.count, self.x = state["count"], state["x"]


def _error(call: Callable[..., object], directory: str, **values: Any) -> str:
    """Return the text of the error that saving or loading raises; empty for none."""
    try:
        call(directory, **values)
    except (CheckpointError, ConfigError) as exc:
        return str(exc)
    return ""


def _save(group: Group, directory: str) -> None:
    loader, metric = Counted(group.rank, torch.ones(2)), Counted(7, torch.full((3,), group.rank))
    same = Counted(5, torch.arange(3))
    parts = {"loader": loader, "metric": metric, "same": same}
    braid.save(directory, model=nn.Linear(2, 2), step=0, group=group, **parts)


def _load(group: Group, directory: str) -> tuple[list[int], list[list[float]], list[str]]:
    parts = {name: Counted(-1, torch.zeros(0)) for name in ("loader", "metric", "same")}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        braid.load(directory, model=nn.Linear(2, 2), group=group, **parts)
    return (
        [part.count for part in parts.values()],
        [part.x.tolist() for part in parts.values()],
        [str(warning.message) for warning in caught],
    )


def test_states_that_differ_between_ranks_are_each_ranks_own(procs, tmp_path):
    procs(2, _save, str(tmp_path))
    for rank, (counts, tensors, said) in enumerate(procs(2, _load, str(tmp_path))):
        assert counts == [rank, 7, 5]
        assert tensors == [[1.0, 1.0], [rank] * 3, [0, 1, 2]]
        assert not said
    ((counts, tensors, said),) = procs(1, _load, str(tmp_path))
    assert counts == [0, 7, 5]
    assert tensors == [[1.0, 1.0], [0] * 3, [0, 1, 2]]
    assert [text.partition(" had different states")[0] for text in said] == ["loader", "metric"]


def _fail_on_rank_1(group: Group, directory: str) -> str:
    part = Counted(0, torch.ones(1))
    if group.rank:
        part.state_dict = lambda: {"object": object()}  # type: ignore[method-assign]
    return _error(braid.save, directory, model=nn.Linear(2, 2), step=0, group=group, part=part)


def test_a_state_that_one_rank_cannot_store_is_an_error_on_all(procs, tmp_path):
    for text in procs(2, _fail_on_rank_1, str(tmp_path)):
        assert "which a checkpoint cannot store" in text


def _save_different(group: Group, directory: str) -> str:
    parts = {"first" if group.rank else "second": Counted(0, torch.ones(1))}
    return _error(braid.save, directory, model=nn.Linear(2, 2), step=0, group=group, **parts)


def test_ranks_save_the_same_objects(procs, tmp_path):
    for text in procs(2, _save_different, str(tmp_path)):
        assert "ranks save different objects (second on rank 0; first on rank 1)" in text


class Counting(Block):
    """A block that counts its forwards in an extra state."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x)

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def _count_on_stages(group: Group, directory: str) -> str:
    model = nn.Sequential(Counting(), Counting())
    hybrid = HybridParallel(model, "pp=2", group, num_microbatches=2)
    x = torch.ones(4, 4)
    hybrid.step(x, x, loss=nn.functional.mse_loss)
    return _error(braid.save, directory, model=hybrid, step=0, group=group)


def test_extra_states_that_forwards_change_on_stages_are_refused(procs, tmp_path):
    for text in procs(2, _count_on_stages, str(tmp_path)):
        assert "differ between the ranks of a pipeline" in text


def _rate_of_one_element(group: Group, directory: str) -> float:
    def begin(rate: float) -> tuple[Any, torch.optim.Optimizer]:
        model = Block()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor([rate]), foreach=False)
        sharding.shard_optimizer(optimizer, model, process_group=group, stage=1)
        return model, optimizer

    model, optimizer = begin(0.25)
    braid.save(directory, model=model, optimizer=optimizer, step=0, group=group)
    model, optimizer = begin(0.5)
    braid.load(directory, model=model, optimizer=optimizer, group=group)
    rate: torch.Tensor = optimizer.param_groups[0]["lr"]
    assert rate.shape == (1,)
    return rate.item()


def test_a_rate_of_one_element_is_saved(procs, tmp_path):
    assert procs(2, _rate_of_one_element, str(tmp_path)) == [0.25, 0.25]


def _load_into(group: Group, directory: str, saved: type[nn.Module], here: type[nn.Module]) -> str:
    braid.save(directory, model=nn.Sequential(saved()), step=0, group=group)
    return _error(braid.load, directory, model=nn.Sequential(here()), group=group)


@pytest.mark.parametrize(
    ("saved", "here", "text"),
    [
        (Scaled, Block, "has extra states of modules"),
        (Block, Scaled, "has no extra states of modules, but 0 have get_extra_state()"),
    ],
)
def test_extra_states_need_a_module_and_modules_need_their_states(
    procs, tmp_path, saved, here, text
):
    (said,) = procs(1, _load_into, str(tmp_path), saved, here)
    assert text in said
