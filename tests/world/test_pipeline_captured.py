"""Values of a captured model go straight to the stages that use them, and change no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from braid.comm import Group
from braid.parallel.graph import capture, segments
from braid.parallel.pipeline import Pipeline
from braid.parallel.pipeline.cutting import edges_of
from braid.parallel.pipeline.microbatches import sizes_of
from braid.parallel.pipeline.stage import Layer


class Linear(nn.Module):
    """Draws its weights from a generator of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(6, 6, generator=generator) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Far(nn.Module):
    """The first layer's result is used by some later ones, an input of the batch by the last but one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(i) for i in range(5))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        enter, second, third, fourth, last = self.layers
        far = enter(x) * 1.5
        x = second(far) - far  # an operation belongs to the part of the module before it
        x = fourth(third(x)) * far * gate
        return last(x) + far.exp()


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 6, generator=generator), torch.rand(rows, 1, generator=generator)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, target)


def made() -> Any:
    return capture(Far().eval(), *batch(4))  # which draws nothing: threads share a generator


def _train(group: Group, schedule: str, recompute: str | int) -> Any:
    pipeline = Pipeline(
        made(), num_microbatches=3, schedule=schedule, group=group, recompute=recompute
    )
    received: dict[int, set[int]] = {}
    for stage, own in pipeline.stages.items():

        def note(_module: nn.Module, args: Any, stage: int = stage) -> None:
            if stage:
                received[stage] = set(args[0]["values"])

        own.layers[0].module.register_forward_pre_hook(note)
    pipeline.step(batch(7), batch(7)[0], loss=loss_of)
    return {name: p.grad for name, p in pipeline.named_parameters()}, received


@pytest.mark.parametrize(
    ("ranks", "schedule", "recompute"),
    [(5, "1f1b", "never"), (5, "gpipe", "always"), (2, "zbv", "never"), (5, "zb_h1", "never"),
     (3, "1f1b", 1)],
)  # fmt: skip
def test_a_value_for_many_stages_changes_no_bit(world, ranks, schedule, recompute):
    model = Far().eval()
    x, gate = batch(7)
    for part, own, target in zip(
        *(torch.split(y, sizes_of(7, 3)) for y in (x, gate, x)), strict=True
    ):
        (loss_of(model(part, own), target) * (len(part) / 7)).backward()
    grads: dict[str, torch.Tensor] = {}
    for own_grads, _ in world(ranks, _train, schedule, recompute):
        grads |= own_grads
    for name, param in model.named_parameters():
        assert torch.equal(grads[name], param.grad), name


def test_stages_between_do_not_receive_a_value_that_a_later_one_uses(world):
    graph = made()
    far, gate = graph.nodes[1].outputs[0], 1
    received: dict[int, set[int]] = {}
    for _, own in world(5, _train, "1f1b", "never"):
        received |= own
    assert {stage for stage in received if far in received[stage]} == {1, 4}  # from neighbours
    assert gate not in set().union(*received.values())
    parts = [[Layer(str(i), part)] for i, part in enumerate(segments(graph, 5))]
    edges = {(edge.source, edge.target, edge.key.name) for edge in edges_of(parts)}
    assert edges == {(0, 3, f"value {gate} for part 3"), (1, 3, f"value {far} for part 3")}


def _modes(group: Group) -> list[bool]:
    pipeline = Pipeline(made(), num_microbatches=2, group=group)
    segment = next(iter(pipeline.stages.values())).layers[0].module
    modes = [pipeline.training, segment.training]
    pipeline.train()
    modes += [pipeline.training, segment.training]
    return modes


def test_stages_are_in_the_mode_of_the_model_until_the_pipeline_changes_it(world):
    assert world(2, _modes) == [[False, False, True, True]] * 2
