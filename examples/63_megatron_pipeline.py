"""The minimal training loop of megatron.core, with a small GPT: only its imports are changed.

braid run -n 4 examples/63_megatron_pipeline.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from braid.compat.megatron import ModelParallelConfig, parallel_state
from braid.compat.megatron import tensor_parallel as tp
from braid.compat.megatron.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from braid.compat.megatron.pipeline_parallel.schedules import get_forward_backward_func

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 32, 4, 4
LENGTH, BATCH, MICROBATCHES, STEPS = 16, 2, 4, 5


@dataclass
class GPTConfig(ModelParallelConfig):
    """Options of Megatron's layers, and the size that schedules read."""

    hidden_size: int = WIDTH


class Layer(nn.Module):
    """Attention and perceptron, each of a column- and a row-parallel matrix."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        options = {"config": config, "init_method": nn.init.xavier_normal_, "bias": True}
        row = {**options, "input_is_parallel": True, "skip_bias_add": False}
        self.heads = HEADS // config.tensor_model_parallel_size
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = tp.ColumnParallelLinear(WIDTH, 3 * WIDTH, **options)
        self.out = tp.RowParallelLinear(WIDTH, WIDTH, **row)
        self.up = tp.ColumnParallelLinear(WIDTH, 4 * WIDTH, **options)
        self.down = tp.RowParallelLinear(4 * WIDTH, WIDTH, **row)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [position, sequence, width] to the same shape."""
        heads = self.qkv(self.norm_1(x))[0].unflatten(-1, (self.heads, -1))
        q, k, v = heads.permute(1, 2, 0, 3).chunk(3, -1)  # [sequence, head, position, ...]
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.permute(2, 0, 1, 3).flatten(2))[0]
        return x + self.down(functional.gelu(self.up(self.norm_2(x))[0]))[0]


class GPTModel(nn.Module):
    """This rank's layers; the embedding on the first stage, and the loss on the last one."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config, self.input_tensor = config, None
        options = {"config": config, "init_method": nn.init.xavier_normal_}
        torch.manual_seed(0)  # all ranks draw the whole model, and keep their parts
        embedding = tp.VocabParallelEmbedding(VOCABULARY, WIDTH, **options)
        layers = nn.ModuleList(Layer(config) for _ in range(LAYERS))
        output = tp.ColumnParallelLinear(WIDTH, VOCABULARY, bias=False, **options)
        size = LAYERS // config.pipeline_model_parallel_size
        first = parallel_state.get_pipeline_model_parallel_rank() * size
        self.embedding = embedding if parallel_state.is_pipeline_first_stage() else None
        self.layers = layers[first : first + size]
        self.output = output if parallel_state.is_pipeline_last_stage() else None

    def set_input_tensor(self, input_tensor: list[torch.Tensor]) -> None:
        """Store the output of the previous stage; schedules call this."""
        self.input_tensor = input_tensor[0]

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return losses on the last stage, else the input of the next stage."""
        x = self.embedding(tokens).transpose(0, 1) if self.embedding else self.input_tensor
        for layer in self.layers:
            x = layer(x)
        if self.output is None:
            return x
        return tp.vocab_parallel_cross_entropy(self.output(x)[0], labels.T.contiguous())


def loss_func(output_tensor: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    loss = output_tensor.float().mean()
    return loss, {"lm loss": loss.item()}


def forward_step_func(data_iterator: Iterator[torch.Tensor], model: nn.Module) -> tuple[Any, Any]:
    text = next(data_iterator)
    return model(text[:, :-1], text[:, 1:]), loss_func


def train(**sizes: int) -> list[float]:
    """Return the losses of all micro-batches of all steps; none unless this is the last stage."""
    parallel_state.initialize_model_parallel(**sizes)
    config = GPTConfig(pipeline_dtype=torch.float32, use_cpu_initialization=True, **sizes)
    gpt_model = DistributedDataParallel(config, DistributedDataParallelConfig(), GPTModel(config))
    optim = torch.optim.Adam(gpt_model.parameters())
    generator = torch.Generator().manual_seed(1)  # the same batches on all replicas
    shape = (STEPS * MICROBATCHES, BATCH, LENGTH + 1)
    train_iterator = iter(torch.randint(VOCABULARY // 4, shape, generator=generator))
    forward_backward_func, losses = get_forward_backward_func(), []
    for _ in range(STEPS):
        optim.zero_grad()
        losses += forward_backward_func(
            forward_step_func=forward_step_func,
            data_iterator=train_iterator,
            model=gpt_model,
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        finalize_model_grads([gpt_model])
        optim.step()
    parallel_state.destroy_model_parallel()
    return [reduced["lm loss"] for reduced in losses]


def main() -> None:
    torch.distributed.init_process_group("braid")
    stages = train(tensor_model_parallel_size=1, pipeline_model_parallel_size=2)
    both = train(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    whole = train(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        assert stages == whole
        torch.testing.assert_close(torch.tensor(both), torch.tensor(whole))
        print(f"loss {whole[0]:.2f} of the first micro-batch, {whole[-1]:.2f} of the last one")
        print("losses equal one process: pp=2 bit by bit, pp=2,tp=2 up to rounding")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
