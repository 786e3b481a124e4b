"""A small GPT of Megatron's layers, in parts for pipeline stages, and batches for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron_program import ParallelAttention, ParallelMLP
from torch import nn

from braid.compat.megatron import ModelParallelConfig, parallel_state, tensor_parallel
from braid.compat.megatron.pipeline_parallel import get_forward_backward_func

VOCABULARY, HIDDEN, SEQUENCE, BATCH, LAYERS = 24, 24, 12, 2, 4


@dataclass
class GPTConfig(ModelParallelConfig):
    """Megatron's configuration with the sizes that schedules read."""

    hidden_size: int = HIDDEN
    calculate_per_token_loss: bool = False


class Layer(nn.Module):
    """Attention and MLP; weights depend on the number of the layer only."""

    def __init__(self, config: GPTConfig, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.norm_1 = nn.LayerNorm(HIDDEN, dtype=config.params_dtype)
        self.attention = ParallelAttention(config)
        self.norm_2 = nn.LayerNorm(HIDDEN, dtype=config.params_dtype)
        self.mlp = ParallelMLP(config)
        for norm in (self.norm_1, self.norm_2):
            for param in norm.parameters():
                param.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        y, bias = self.attention(self.norm_1(x))
        x = x + y + bias
        y, bias = self.mlp(self.norm_2(x))
        return x + y + bias


class GPT(nn.Module):
    """The layers `numbers` of a GPT, with the embedding in the first and the loss in the last part."""

    share_embeddings_and_output_weights = True

    def __init__(self, config: GPTConfig, numbers: range, last: int = LAYERS) -> None:
        super().__init__()
        self.config = config
        self.pre_process, self.post_process = numbers.start == 0, numbers.stop == last
        self.input_tensor: torch.Tensor | None = None
        self.layers = nn.ModuleDict({str(number): Layer(config, number) for number in numbers})
        self.word_embeddings = None
        if self.pre_process or self.post_process:
            torch.manual_seed(1000)
            self.word_embeddings = tensor_parallel.VocabParallelEmbedding(
                VOCABULARY,
                HIDDEN,
                init_method=partial(nn.init.normal_, std=0.2),
                config=config,
                reduce_scatter_embeddings=config.sequence_parallel,
            )

    def set_input_tensor(self, input_tensor: list[torch.Tensor | None]) -> None:
        (self.input_tensor,) = input_tensor

    def shared_embedding_or_output_weight(self) -> Any:
        return None if self.word_embeddings is None else self.word_embeddings.weight

    def forward(self, tokens, labels):
        x = self.input_tensor
        if self.pre_process:
            x = self.word_embeddings(tokens)
            x = x if self.config.sequence_parallel else x.transpose(0, 1).contiguous()
        for layer in self.layers.values():
            x = layer(x)
        if not self.post_process:
            return x
        weight = self.word_embeddings.weight
        group = parallel_state.get_tensor_model_parallel_group()
        logits = tensor_parallel.linear_with_grad_accumulation_and_async_allreduce(
            x,
            weight,
            None,
            False,
            group.size() > 1 and not self.config.sequence_parallel,
            self.config.sequence_parallel,
        )
        return tensor_parallel.vocab_parallel_cross_entropy(
            logits, labels.transpose(0, 1).contiguous()
        )


def parts(config: GPTConfig, virtual: int = 1) -> list[GPT]:
    """This rank's chunks."""
    stages = parallel_state.get_pipeline_model_parallel_world_size() * virtual
    rank, length = parallel_state.get_pipeline_model_parallel_rank(), LAYERS // stages
    numbers = range(rank, stages, stages // virtual)
    return [GPT(config, range(n * length, (n + 1) * length)) for n in numbers]


def batch(number: int, length: int = SEQUENCE) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    text = torch.randint(VOCABULARY, (BATCH, length + 1), generator=generator)
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}


def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, float]:
    loss = losses.mean()
    return loss, loss.item()


def token_loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The sum of the losses of some tokens, and their number."""
    used = losses.flatten()[: losses.numel() // 2]
    return used.sum(), torch.tensor(used.numel(), dtype=torch.int), used.sum().item()


def forward_step(data_iterator: Any, model: nn.Module, loss=mean_loss) -> tuple[torch.Tensor, Any]:
    return model(**next(data_iterator)), loss


def run_schedule(models: list[nn.Module], numbers: list[int], **options: Any) -> list[Any]:
    """The schedule of parallel_state on micro-batches by number."""
    chunked = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
    iterators = [map(batch, numbers) for _ in models]
    arguments = {
        "forward_step_func": forward_step,
        "data_iterator": iterators if chunked else iterators[0],
        "model": models if chunked else models[0],
        "num_microbatches": len(numbers),
        "seq_length": SEQUENCE,
        "micro_batch_size": BATCH,
    }
    return get_forward_backward_func()(**(arguments | options))
