"""Operations that are counted on the meta device, and what a described device makes of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import braid
from benchmarks.device_fit import _Models, read_iterations
from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.expert_parallel import MixtureOfExperts
from braid.parallel.tensor_parallel import parallelize
from braid.plan.described import DescribedModel, count_operations
from braid.plan.find import (
    captured_layers,
    copied_without_memory,
    described_layers,
    fastest_meshes,
)
from braid.plan.lone_rank import LoneRank
from braid.plan.plan_file import read_plan
from braid.plan.profiling import PerRows
from braid.programs.topology import DEVICES, Efficiency, flat, from_toml
from braid.train.config import ModelSize
from braid.train.gpt import GPT
from braid.train.models import captured, described, gpt
from support.worlds import run_threads

CONTEXT, WIDTH = 16, 64
VTRAIN = Path(__file__).parents[1] / "data/vtrain/ground_truth_single.csv"


def test_operations_of_a_gpt_are_those_of_its_formula() -> None:
    layers = gpt("tiny", CONTEXT, size=ModelSize(1, WIDTH, 4))
    first, block, last = count_operations(layers.named, layers.sample)
    flops = sum(op.flops.per_row for op in block.operations)
    # matrices, and half of the square of attention, which is causal
    assert flops == CONTEXT * (24 * WIDTH**2 + 2 * CONTEXT * WIDTH)
    assert sum(op.flops.per_row for op in last.operations) == 2 * CONTEXT * 256 * WIDTH
    assert not sum(op.flops.per_row for op in first.operations)
    assert block.param_bytes == 4 * (12 * WIDTH**2 + 2 * WIDTH)
    assert block.output_bytes == PerRows(0.0, 4.0 * CONTEXT * WIDTH)


def test_kept_bytes_are_those_of_the_real_layers_but_for_attention() -> None:
    torch.manual_seed(0)
    layers = [("up", nn.Linear(8, 32)), ("act", nn.GELU()), ("down", nn.Linear(32, 8))]
    counted = count_operations(layers, lambda rows: torch.ones(rows, 8))
    assert [layer.saved_bytes.per_row for layer in counted] == [4.0 * 32, 4.0 * 32, 4.0 * 8]
    assert all(layer.saved_bytes.constant == 0.0 for layer in counted)
    assert counted[0].operations[0].has_weight


def test_shared_layers_do_their_part_and_reduce_twice() -> None:
    whole = gpt("tiny", CONTEXT, size=ModelSize(1, WIDTH, 4))
    half = gpt("tiny", CONTEXT, tensor=2, size=ModelSize(1, WIDTH, 4))
    one = count_operations(whole.named, whole.sample)[1]
    two = count_operations(half.named, half.sample, ranks=half.ranks)[1]
    assert sum(op.flops.per_row for op in two.operations) == pytest.approx(
        sum(op.flops.per_row for op in one.operations) / 2
    )
    assert (one.reduces, two.reduces) == (0, 2)
    assert two.reduced_bytes.per_row == 2 * 4 * CONTEXT * WIDTH


def test_a_lone_rank_computes_its_part() -> None:
    whole = GPT(ModelSize(1, WIDTH, 4), CONTEXT, tied=False)
    alone = GPT(ModelSize(1, WIDTH, 4), CONTEXT, tied=False)
    parallelize(alone, LoneRank(1))
    x = torch.randint(0, 256, (2, CONTEXT), generator=torch.Generator().manual_seed(0))
    assert torch.equal(whole(x), alone(x))


def test_an_operation_takes_as_long_as_its_work_or_its_bytes() -> None:
    device = dataclasses.replace(
        DEVICES["a100-40gb"],
        efficiency=Efficiency(flops=0.5, memory=0.5, operation_s=1e-6),
    )
    layers = [("matrix", nn.Linear(1024, 1024, bias=False)), ("act", nn.ReLU())]
    counted = count_operations(layers, lambda rows: torch.ones(rows, 1024))
    model = DescribedModel("m", {1: counted}, device, "fp32")
    matrix, act = model.layers(4096, 1)
    flops_s = 2 * 4096 * 1024**2 / (19.5e12 * 0.5)
    assert matrix.forward_s == pytest.approx(flops_s + 1e-6)
    assert matrix.input_s == matrix.weight_s == pytest.approx(matrix.forward_s)
    bytes_s = 2 * 4 * 4096 * 1024 / (1555e9 * 0.5)
    assert act.forward_s == pytest.approx(bytes_s + 1e-6)
    assert act.input_s == pytest.approx(1.5 * bytes_s + 1e-6)
    assert act.weight_s == 0.0


def test_the_table_of_models_has_all_their_layers() -> None:
    model, names = described("", "gpt2-mini", CONTEXT, DEVICES["v100-32gb"], "fp16")
    assert model.num_layers == len(names) == 6
    assert model.tensor_sizes == [1, 2, 4]
    numbers = [layer.params for layer in model.layers(2, 1)]
    assert len({p for own in numbers for p in own}) == sum(map(len, numbers))  # nothing is shared
    device = dataclasses.replace(DEVICES["t4"], name="own", flops_per_s={"fp32": 1.0})
    with pytest.raises(ConfigError, match="the peak of own with fp16 is not known"):
        described("", "mini", CONTEXT, device, "fp16")


def test_a_model_of_the_users_is_described_by_its_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "two_layers_to_plan.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n    return nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (torch.ones(4, 4),)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert len(captured("two_layers_to_plan:make").named) == 2
    model, names = described("two_layers_to_plan:make", "", 0, DEVICES["t4"], "fp32")
    assert model.num_layers == len(names) == 2


def test_axes_of_sequences_and_experts_follow_the_layers() -> None:
    gpt, _ = described("", "mini", CONTEXT, DEVICES["t4"], "fp32")
    assert gpt.sequence_sizes == [n for n in range(1, 17) if n == 1 or CONTEXT % (2 * n) == 0]
    embed, block, *_ = gpt.layers(3, 1)
    assert (embed.kv_bytes, block.kv_bytes) == (0, 3 * 2 * 4 * CONTEXT * 128)
    assert gpt.layers(3, 2)[1].kv_bytes == block.kv_bytes / 2  # has half of the heads
    assert (gpt.expert_sizes, gpt.left_out) == ((1,), ())


class Mixed(nn.Module):
    """Attention, and then a mixture of six experts."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.project = nn.utils.skip_init(nn.Linear, 8, 8)
        nn.init.eye_(self.project.weight)
        nn.init.zeros_(self.project.bias)
        self.experts = MixtureOfExperts(8, 16, 6, group=group, top_k=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).unsqueeze(1)
        x = nn.functional.scaled_dot_product_attention(heads, heads, heads).squeeze(1)
        return self.experts(x)


def test_experts_are_counted_for_an_even_load() -> None:
    (model, whole) = run_threads(1, _described_experts)[0]
    assert (model.sequence_sizes, model.expert_sizes) == ((1,), [1, 2, 3, 6])
    assert [*model.left_out] == [
        "Axis cp is left out: a captured model does not support sharded sequences."
    ]
    cost = model.layers(3, 1)[-1]
    tokens, one_expert = 3 * 4, 2 * 8 * 16
    assert cost.routed_bytes == 4 * 2 * tokens * 8
    assert cost.expert_bytes == 4 * 6 * one_expert
    assert cost.kv_bytes == 0
    flops = sum(op.flops.of(3) for op in whole[-1].operations if op.name == "experts")
    assert flops == 2 * 2 * tokens * one_expert


def _described_experts(group: Group) -> tuple[Any, Any]:
    model = nn.Sequential(Mixed(group))
    layers = captured_layers(model, torch.linspace(-1, 1, 4 * 4 * 8).view(4, 4, 8))
    counts = count_operations(copied_without_memory(layers.named), layers.sample)
    costs = described_layers("mixed", layers.named, counts, DEVICES["t4"], "fp32")
    return costs, counts


def test_a_layer_whose_operations_depend_on_the_rows_is_refused() -> None:
    class Moody(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if len(x) > 2 else x

    with pytest.raises(ConfigError, match="layer moody runs other operations with 3 rows"):
        count_operations([("moody", Moody())], lambda rows: torch.ones(rows, 2))


def test_the_device_of_the_table_predicts_the_iterations_of_others() -> None:
    iterations = read_iterations(VTRAIN)
    assert len(iterations) == 1440
    errors = _Models(iterations).errors(Efficiency(), np.arange(len(iterations)))
    assert np.abs(errors).mean() < 0.084
    with pytest.raises(ConfigError, match="cannot read"):
        read_iterations(VTRAIN.with_name("missing.csv"))


CLUSTER = """
[[level]]
name = "host"
size = 4
latency_s = 3e-6
bytes_per_s = 10e9

[device]
name = "t4"
"""


def test_a_program_finds_a_plan_for_its_own_model(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    plan = braid.find_plan(model, torch.ones(4, 64), batch=16, cluster=tmp_path / "cluster.toml")
    assert plan.ranks == 4
    assert {p.device.type for p in model.parameters()} == {"cpu"}  # as it was
    assert plan.predicted is not None
    assert plan.predicted.seconds > 0
    plan.write(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    with pytest.raises(ConfigError, match="does not fit on 4 ranks"):
        braid.find_plan(
            model, torch.ones(4, 64), batch=16, cluster=from_toml(CLUSTER), memory_bytes=1e3
        )
    with pytest.raises(ConfigError, match="add a \\[device\\]"):
        braid.find_plan(model, torch.ones(4, 64), batch=16, cluster=flat(2, 0.0, 1e9))
    with pytest.raises(ConfigError, match="forward does not take these arguments"):
        braid.find_plan(model, torch.ones(4, 64), y=1, batch=16, cluster=from_toml(CLUSTER))
    with pytest.raises(ConfigError, match="memory_bytes must be above 0"):
        braid.find_plan(
            model, torch.ones(4, 64), batch=16, cluster=from_toml(CLUSTER), memory_bytes=-5
        )
    with pytest.raises(ConfigError, match=r"missing\.toml cannot be read"):
        braid.find_plan(model, torch.ones(4, 64), batch=16, cluster="missing.toml")


def test_the_fastest_mesh_follows_the_network_the_memory_and_the_rounds() -> None:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    x = torch.ones(4, 512)

    def choose(num_ranks: int, bytes_per_s: float = 10e9, **limits: float) -> str:
        cluster = from_toml(CLUSTER.replace("10e9", f"{bytes_per_s:g}"))
        how: dict[str, Any] = {"rows": 4096, "shards": 4, "num_microbatches": 4, **limits}
        return fastest_meshes(model, x, cluster=cluster, **how)(num_ranks)

    assert choose(4) == "dp=4"
    assert choose(4, 1e8, rows=8) == "pp=4,dp=1"  # weights are larger than activations
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert choose(2, rows=8) == "dp=2"
    assert choose(2, rows=8, memory_bytes=3.2 * weights) == "pp=2,dp=1"
    assert choose(1) == "dp=1"
    with pytest.raises(ConfigError, match="does not fit on 2 ranks of 1e-06 GB"):
        choose(2, memory_bytes=1e3)
