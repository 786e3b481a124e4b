"""One rank of a training by Megatron's schedules and optimizer, for `test_megatron_core`.

python megatron_trained.py megatron.core|braid.compat.megatron WAY RANK STORE RESULTS

The same program runs on both libraries. megatron-core asks for GPUs: its tensors are put on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

LAYERS, HIDDEN, VOCABULARY, SEQUENCE, BATCH, STEPS = 4, 8, 16, 6, 2, 3
SHARDED = {"use_distributed_optimizer": True}
HALF = {"bf16": True, "params_dtype": torch.bfloat16}
CHUNKED = {"overlap_p2p_comm": True, "batch_p2p_comm": False}


@dataclass(frozen=True, kw_only=True)
class Way:
    """A mesh with options of the configuration, of data parallelism and of the optimizer."""

    ranks: int
    pp: int
    vp: int | None = None
    microbatches: int = 4
    config: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)


WAYS = {
    "stages": Way(ranks=4, pp=4, microbatches=6),
    "replicas": Way(ranks=2, pp=1, microbatches=3, optimizer={"optimizer": "sgd"}),
    "replicas of stages": Way(ranks=4, pp=2, ddp={"overlap_grad_reduce": True, "bucket_size": 100}),
    "sharded": Way(ranks=4, pp=2, ddp=SHARDED, optimizer=SHARDED),
    "half precision": Way(
        ranks=4,
        pp=2,
        config=HALF,
        ddp={"grad_reduce_in_fp32": True, "overlap_grad_reduce": True} | SHARDED,
        optimizer=HALF | SHARDED,
    ),
    "chunks": Way(ranks=2, pp=2, vp=2, config=CHUNKED | {"calculate_per_token_loss": True}),
    "chunks by 3": Way(
        ranks=2,
        pp=2,
        vp=2,
        microbatches=6,
        config=CHUNKED | {"microbatch_group_size_per_vp_stage": 3},
    ),
}


class OnCPU(TorchFunctionMode):
    """Puts on the CPU what asks for a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class Part(nn.Module):
    """Consecutive layers; the first and the last part have the embedding, which is also the output layer."""

    share_embeddings_and_output_weights = True

    def __init__(self, config: Any, number: int, count: int, chunk: int | None) -> None:
        super().__init__()
        self.config, self.vp_stage = config, chunk
        self.pre_process, self.post_process = number == 0, number == count - 1
        self.layers = nn.ModuleDict()
        length = LAYERS // count
        for layer in range(number * length, (number + 1) * length):
            torch.manual_seed(layer)
            linear = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
            self.layers[str(layer)] = nn.Sequential(linear[0], nn.Tanh(), linear[1])
        self.embedding = None
        if self.pre_process or self.post_process:
            torch.manual_seed(99)
            self.embedding = nn.Parameter(torch.randn(VOCABULARY, HIDDEN) * 0.3)
            if count > 1:
                self.embedding.shared_embedding = True
                self.embedding.shared = not self.pre_process
        self.to(config.params_dtype)

    def shared_embedding_or_output_weight(self) -> Any:
        return self.embedding

    def set_input_tensor(self, input_tensor: list[torch.Tensor]) -> None:
        (self.input_tensor,) = input_tensor

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding[tokens].transpose(0, 1) if self.pre_process else self.input_tensor
        for layer in self.layers.values():
            x = x + layer(x)
        if not self.post_process:
            return x.contiguous()
        logits = (x @ self.embedding.T).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.T.reshape(-1), reduction="none")


def batches(first: int, every: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    number = first
    while True:
        generator = torch.Generator().manual_seed(number)
        text = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        number += every
        yield text[:, :-1], text[:, 1:]


def configuration(library: str, way: Way) -> Any:
    options = {
        "pipeline_model_parallel_size": way.pp,
        "virtual_pipeline_model_parallel_size": way.vp,
        "pipeline_dtype": way.config.get("params_dtype", torch.float32),
        "use_cpu_initialization": True,
    } | way.config
    if library == "megatron.core":
        transformer_config = importlib.import_module("megatron.core.transformer.transformer_config")
        sizes = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 2}
        return transformer_config.TransformerConfig(**sizes, **options)
    megatron = importlib.import_module(library)

    @dataclass
    class Config(megatron.ModelParallelConfig):
        hidden_size: int = HIDDEN
        calculate_per_token_loss: bool = False

    return Config(**options)


def trained(library: str, way: Way) -> dict[str, Any]:
    """Losses, gradients and weights of this rank."""
    names = ("parallel_state", "distributed", "optimizer", "pipeline_parallel.schedules")
    state, distributed, optimizers, schedules = (
        importlib.import_module(f"{library}.{name}") for name in names
    )
    state.initialize_model_parallel(1, way.pp, virtual_pipeline_model_parallel_size=way.vp)
    config = configuration(library, way)
    count, rank = way.pp * (way.vp or 1), state.get_pipeline_model_parallel_rank()
    parts = [
        Part(config, number, count, chunk if way.vp else None)
        for chunk, number in enumerate(range(rank, count, way.pp))
    ]
    if library == "megatron.core":
        for part in parts:
            part.model_type = importlib.import_module("megatron.core.enums").ModelType(1)
    ddp_config = distributed.DistributedDataParallelConfig(**way.ddp)
    chunks = [
        distributed.DistributedDataParallel(config, ddp_config, part, disable_bucketing=number > 0)
        for number, part in enumerate(parts)
    ]
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in chunks]
        config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
        if way.vp is None:
            (config.no_sync_func,), (config.grad_sync_func,) = (
                config.no_sync_func,
                config.grad_sync_func,
            )
    config.finalize_model_grads_func = distributed.finalize_model_grads
    options = optimizers.OptimizerConfig(lr=0.01, clip_grad=0.5, **way.optimizer)
    optimizer = optimizers.get_megatron_optimizer(options, chunks)
    place = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
    iterators = [batches(*place) for _ in chunks]

    def loss(output: torch.Tensor) -> tuple[Any, ...]:
        if config.calculate_per_token_loss:
            return output.sum(), torch.tensor(output.numel(), dtype=torch.int), output.sum().item()
        mean = output.float().mean()
        return mean, mean.item()

    def run(*, forward_only: bool = False) -> list[Any]:
        return schedules.get_forward_backward_func()(
            forward_step_func=lambda iterator, model: (model(*next(iterator)), loss),
            data_iterator=iterators if way.vp else iterators[0],
            model=chunks if way.vp else chunks[0],
            num_microbatches=way.microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=forward_only,
        )

    named = [pair for chunk in chunks for pair in chunk.module.named_parameters()]
    losses, grads, steps = [], [], []
    for _ in range(STEPS):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append(run())
        if not ddp_config.use_distributed_optimizer:  # else a rank has a part of each
            grads.append({name: param.main_grad.clone() for name, param in named})
        steps.append(optimizer.step())
    return {
        "losses": [*losses, run(forward_only=True)],
        "grads": grads,
        "steps": steps,
        "weights": {name: param.detach().clone() for name, param in named},
    }


def main(library: str, way: str, rank: str, store: str, results: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    is_original = library == "megatron.core"
    if is_original:
        torch.cuda.current_device = lambda: torch.device("cpu")
        torch.cuda.synchronize = lambda *_: None
    else:
        importlib.import_module("braid.comm.torch_backend")
    dist.init_process_group(
        "gloo" if is_original else "braid",
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=WAYS[way].ranks,
    )
    with OnCPU() if is_original else contextlib.nullcontext():
        torch.save(trained(library, WAYS[way]), results)
        dist.barrier()
    os._exit(0)  # megatron-core's end asks for GPUs


if __name__ == "__main__":
    main(*sys.argv[1:])
