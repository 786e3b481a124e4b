"""Pictures of the pages on PipeDream, drawn from its planner, the capture of a model, and a simulated schedule."""

from __future__ import annotations

import re
from collections.abc import Callable
from runpy import run_path

import torch
from torch import nn

from braid.parallel.graph import capture
from braid.plan.pipedream import MachineLevel, ProfiledNode, StagePlan, partition, states_of
from braid.programs.schedule import Costs, simulate
from braid.programs.schedule.bars import COLOUR_OF, Bar, draw
from braid.programs.schedule.pipeline import asynchronous
from braid.programs.topology import flat
from example_runs import EXAMPLES
from handbook_calls import GraphPart, graph_picture

MACHINES, BANDWIDTH = 4, 1e9


def stages_of_a_graph() -> str:
    """The graph of the example in the stages that both programs of PipeDream choose."""
    graph = run_path(str(EXAMPLES / "47_pipedream_plan.py"))["diamond"]()
    states = states_of(graph)
    pictures = []
    for recurrence in ("paper", "released"):
        found = partition(states, [MachineLevel(MACHINES, BANDWIDTH)], recurrence=recurrence)
        stage_of = {name: place for place, each in enumerate(found.stages) for name in each.nodes}
        names = list(graph.nodes)
        users = {name: [n for n in names if name in graph.edges[n]] for name in names}
        parts = [
            GraphPart(stage_of[name], _described(node), tuple(names.index(n) for n in users[name]))
            for name, node in graph.nodes.items()
        ]
        title = f"{recurrence}: {found.seconds * 1e3:.2f} ms for a batch"
        pictures.append((title, graph_picture(parts, [_machines(each) for each in found.stages])))
    return _stacked(pictures)


def _described(node: ProfiledNode) -> str:
    seconds = node.forward_s + node.backward_s
    return f"{node.name}: {seconds * 1e3:g} ms, {node.param_bytes / 1e6:g} MB"


def _machines(stage: StagePlan) -> str:
    return f"{stage.replicas} machine{'s' * (stage.replicas > 1)}"


def _stacked(pictures: list[tuple[str, str]]) -> str:
    """Put pictures below each other, each with its title."""
    parts, wide, top = [], 0.0, 20.0
    for title, picture in pictures:
        size = [float(n) for n in re.findall(r'(?:width|height)="([\d.]+)"', picture)[:2]]
        parts.append(f'<text x="4" y="{top - 4:g}" font-weight="bold">{title}</text>')
        parts.append(picture.replace("<svg ", f'<svg y="{top:g}" ', 1))
        wide, top = max(wide, size[0]), top + size[1] + 26
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:g}" height="{top - 20:g}" '
    return f'{head}font-family="sans-serif" font-size="12">\n' + "".join(parts) + "</svg>\n"


class Residual(nn.Module):
    """Two layers with a sum around each, and a head that also gets the input."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(2 * width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(torch.cat([x, first], dim=1))


def stages_of_a_model() -> str:
    """The captured calls of a model in two stages, and the values that cross the cut."""
    graph = capture(Residual(), torch.randn(8, 16))
    cut = graph.cuts(2)[1]
    parts = [GraphPart(0, "x", ())]
    made_by = dict.fromkeys(range(graph.num_inputs), 0)
    for number, node in enumerate(graph.nodes):
        parts.append(
            GraphPart(int(number >= cut), node.name, tuple(made_by[v] for v in node.inputs))
        )
        made_by.update(dict.fromkeys(node.made, number + 1))
    return graph_picture(parts, ["stage 0", "stage 1"])


SECONDS = {"F": 1.0, "B": 2.0, "STEP": 0.4}


def pipedreams_runtime() -> str:
    """Three ranks of a schedule with one stage each: work, and messages below it."""
    program = asynchronous((1, 1, 1), 6, versions="stash", every=1)
    costs = Costs(lambda _r, _a: 0.4, lambda _r, action: SECONDS.get(action.kind, 0.0))
    timeline = simulate(program, costs, flat(3, 0.0, 1.0), buffered=True)
    version = {(a.kind, a.unit, a.index): a.version for own in program.ranks for a in own}
    bars = []
    for each in timeline.intervals:
        kind, stage, index = each.action[:3]
        name = kind.partition("_")[0]
        title = f"{kind} of micro-batch {index}"
        if not each.is_message:
            title += f", version {version[kind, stage, index]}"
        part = {"send": "upper", "recv": "lower"}.get(name, "whole")
        label = "" if name == "STEP" or each.is_message else str(index)
        lane = 2 * each.rank + each.is_message
        bars.append(Bar(lane, each.start_s, each.end_s, COLOUR_OF[name], title, label, part))
    lanes = [text for rank in range(3) for text in (f"rank {rank}", "messages")]
    names = {"F": "forward", "B": "backward", "STEP": "step", "send": "send", "recv": "receive"}
    legend = {text: COLOUR_OF[kind] for kind, text in names.items()}
    return draw(lanes, bars, timeline.seconds, legend=legend)


PIPEDREAM: tuple[Callable[[], str], ...] = (
    stages_of_a_graph,
    stages_of_a_model,
    pipedreams_runtime,
)
