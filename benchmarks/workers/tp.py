"""One rank of `tp`: training steps of one model, divided by several engines, in turns.

    alone           the whole model; all ranks compute at the same time
    transformers    transformers' plan over Gloo; `transformers_braid` over the backend "braid"
    torch           torch's parallelize_module over Gloo; `torch_braid` over "braid"
    modules         braid's division by modules
    braid           braid's division by the graph

All divide the same layers, including embedding and head, and return whole logits; `apart` is
braid's division by the graph with sharded logits. Each engine has a separate copy of the model, and
a step is loss, gradients and AdamW. In every round each takes one step, in random order. The models
are from transformers, with random weights.
"""

from __future__ import annotations

import copy
import importlib
import re
import statistics
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from braid.cli.bench.harness.rounds import in_rounds, median_ratio
from braid.comm import Group
from braid.context import init, shutdown
from braid.parallel.tensor_parallel import parallelize
from braid.parallel.tensor_parallel.insertion.explain import totals

__all__ = ["MODEL_NAMES", "VARIANTS", "Case", "Measured", "Plan", "main"]

VARIANTS = (
    "alone",
    "transformers",
    "transformers_braid",
    "torch",
    "torch_braid",
    "modules",
    "braid",
    "apart",
)
MODEL_NAMES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}
WARM_UP = 3
VOCABULARY, HEADS, KV_HEADS = 2048, 8, 4
LAYER_PLAN: dict[str, Callable[[], ParallelStyle]] = {
    "self_attn.q_proj": ColwiseParallel,
    "self_attn.k_proj": ColwiseParallel,
    "self_attn.v_proj": ColwiseParallel,
    "self_attn.o_proj": RowwiseParallel,
    "mlp.gate_proj": ColwiseParallel,
    "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}


class Case(msgspec.Struct, frozen=True):
    """One model with one batch.

    Attributes:
        model: Name out of `MODEL_NAMES`, or gpt2.
        width: Width of the hidden states; the MLP is three times as wide.
        layers: Number of layers.
        batch: Number of sequences.
        length: Number of positions in a sequence.
    """

    model: str
    width: int
    layers: int
    batch: int
    length: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements to make.

    Attributes:
        cases: Models.
        rounds: Largest number of steps of each engine.
        budget_s: Approximate seconds for a case.
    """

    cases: tuple[Case, ...]
    rounds: int
    budget_s: float


class Measured(msgspec.Struct, kw_only=True):
    """Figures of one case.

    Attributes:
        case: Model and batch.
        ranks: World size.
        step_s: Median seconds of a step on the slowest rank, by variant.
        speedup: Ratio of the variant's step to braid's, median of the rounds.
        collectives: Number of collectives in a step of braid, by the explanation.
        sent: Number of collectives that a step has done.
        largest_gap: Largest difference between a variant's loss and the whole model's loss.
        rounds_s: Seconds of every step, by variant.
    """

    case: Case
    ranks: int
    step_s: dict[str, float]
    speedup: dict[str, float]
    collectives: int
    sent: int
    largest_gap: float
    rounds_s: dict[str, list[float]]


def main(plan: Plan) -> list[Measured] | None:
    """Measure everything; rank 0 returns the figures."""
    warnings.simplefilter("ignore")
    group = init()
    dist.init_process_group("gloo")
    over_braid = dist.new_group(backend="braid")
    assert over_braid is not None, "all ranks are in the group"
    world = dist.group.WORLD
    assert world is not None, "the process group is there"
    meshes = (DeviceMesh.from_group(world, "cpu"), DeviceMesh.from_group(over_braid, "cpu"))
    rows = [_measure(group, meshes, case, plan) for case in plan.cases]
    dist.destroy_process_group()
    shutdown()
    return rows if group.rank == 0 else None


def model_of(case: Case) -> nn.Module:
    """Return a model of transformers with random weights, equal on all ranks."""
    hf = importlib.import_module("transformers")
    name = MODEL_NAMES[case.model]
    config = getattr(hf, f"{name}Config")(
        vocab_size=VOCABULARY,
        hidden_size=case.width,
        intermediate_size=3 * case.width,
        num_hidden_layers=case.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=max(case.length, 64),
        use_cache=False,
    )
    torch.manual_seed(0)
    model: nn.Module = getattr(hf, f"{name}ForCausalLM")(config)
    return model


def by_torch(model: nn.Module, mesh: DeviceMesh, layers: int) -> nn.Module:
    """Divide a model by torch's parallelize_module."""
    plan: dict[str, ParallelStyle] = {
        f"model.layers.{layer}.{name}": style()
        for layer in range(layers)
        for name, style in LAYER_PLAN.items()
    }
    whole = Replicate()
    plan["lm_head"] = ColwiseParallel(output_layouts=whole)
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=whole)
    return parallelize_module(model, mesh, plan)


def by_transformers(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Divide a model by transformers' plan."""
    room = importlib.import_module("transformers.distributed.tensor_parallel")
    plan = {}
    for name, module in model.named_modules():
        style = model.tp_plan.get(re.sub(r"\.\d+\.", ".*.", name))
        if style is not None:
            plan[name] = style
            for param in dict(module.named_parameters()):  # as it does while it loads weights
                room.ALL_PARALLEL_STYLES[style].shard_param(module, param, mesh)
    divided: nn.Module = room.apply_tensor_parallelism(model, mesh, plan)
    return divided


def _measure(
    group: Group, meshes: tuple[DeviceMesh, DeviceMesh], case: Case, plan: Plan
) -> Measured:
    base = model_of(case)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (case.batch, case.length), generator=generator)
    inputs = {"input_ids": ids, "labels": ids.clone()}
    gloo, braid = meshes
    copies = {name: copy.deepcopy(base) for name in VARIANTS}
    by_transformers(copies["transformers"], gloo)
    by_transformers(copies["transformers_braid"], braid)
    by_torch(copies["torch"], gloo, case.layers)
    by_torch(copies["torch_braid"], braid, case.layers)
    parallelize(copies["modules"], group)
    division = parallelize(copies["braid"], group, inputs=inputs)
    parallelize(copies["apart"], group, inputs=inputs, gather_outputs=False)
    steps = {name: _step_of(model, inputs) for name, model in copies.items()}
    losses = {name: step() for name, step in steps.items()}
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    before = group.statistics()["num_operations"]
    steps["braid"]()
    sent = group.statistics()["num_operations"] - before
    times = in_rounds(group, steps, rounds=plan.rounds, budget_s=plan.budget_s)
    sums = totals(division.rows)
    return Measured(
        case=case,
        ranks=group.size,
        step_s={name: statistics.median(seconds) for name, seconds in times.items()},
        speedup={name: median_ratio(seconds, times["braid"]) for name, seconds in times.items()},
        collectives=sums.forward.total() + sums.backward.total(),
        sent=int(sent),
        largest_gap=max(abs(loss - losses["alone"]) for loss in losses.values()),
        rounds_s=times,
    )


def _step_of(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)

    def step() -> float:
        loss: torch.Tensor = model(**inputs).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step
