"""A program for Megatron-LM's parallel_state and tensor_parallel: only its imports are changed."""

from __future__ import annotations

import torch
from torch.nn import functional

# was: from megatron.core import ModelParallelConfig, parallel_state, tensor_parallel
from braid.compat.megatron import ModelParallelConfig, parallel_state, tensor_parallel

VOCABULARY, HIDDEN, HEADS, SEQUENCE, BATCH = 24, 24, 12, 12, 2


def init_method(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.init.normal_(tensor, mean=0.0, std=0.2)


class ParallelMLP(torch.nn.Module):
    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = tensor_parallel.ColumnParallelLinear(
            HIDDEN,
            4 * HIDDEN,
            config=config,
            init_method=init_method,
            gather_output=False,
            skip_bias_add=True,
        )
        self.dense_4h_to_h = tensor_parallel.RowParallelLinear(
            4 * HIDDEN,
            HIDDEN,
            config=config,
            init_method=init_method,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=True,
        )

    def forward(self, hidden_states):
        intermediate_parallel, bias_parallel = self.dense_h_to_4h(hidden_states)
        intermediate_parallel = functional.gelu(intermediate_parallel + bias_parallel)
        return self.dense_4h_to_h(intermediate_parallel)


class ParallelAttention(torch.nn.Module):
    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__()
        world_size = parallel_state.get_tensor_model_parallel_world_size()
        self.heads = tensor_parallel.divide(HEADS, world_size)
        self.query_key_value = tensor_parallel.ColumnParallelLinear(
            HIDDEN, 3 * HIDDEN, config=config, init_method=init_method, gather_output=False
        )
        self.dense = tensor_parallel.RowParallelLinear(
            HIDDEN,
            HIDDEN,
            config=config,
            init_method=init_method,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=True,
        )

    def forward(self, hidden_states):
        mixed, _ = self.query_key_value(hidden_states)  # [s, b, heads * 3 * hn]
        mixed = mixed.view(*mixed.shape[:-1], self.heads, -1)
        query, key, value = tensor_parallel.split_tensor_along_last_dim(mixed, 3)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        context = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        context = context.permute(2, 0, 1, 3).flatten(2)
        return self.dense(context)


class Model(torch.nn.Module):
    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = tensor_parallel.VocabParallelEmbedding(
            VOCABULARY,
            HIDDEN,
            init_method=init_method,
            config=config,
            reduce_scatter_embeddings=config.sequence_parallel,
        )
        self.input_norm = torch.nn.LayerNorm(HIDDEN, dtype=config.params_dtype)
        self.attention = ParallelAttention(config)
        self.norm = torch.nn.LayerNorm(HIDDEN, dtype=config.params_dtype)
        self.mlp = ParallelMLP(config)
        self.output_layer = tensor_parallel.ColumnParallelLinear(
            HIDDEN,
            VOCABULARY,
            config=config,
            init_method=init_method,
            bias=False,
            skip_weight_param_allocation=True,
        )
        for norm in (self.input_norm, self.norm):
            for param in norm.parameters():
                param.sequence_parallel = config.sequence_parallel

    def layer(self, hidden_states):
        output, bias = self.attention(self.input_norm(hidden_states))
        hidden_states = hidden_states + output + bias
        output, bias = self.mlp(self.norm(hidden_states))
        return hidden_states + output + bias

    def forward(self, tokens, labels, recompute=False):
        hidden_states = self.word_embeddings(tokens)
        if not self.config.sequence_parallel:
            hidden_states = hidden_states.transpose(0, 1).contiguous()  # [s, b, h]
        if recompute:
            hidden_states = tensor_parallel.checkpoint(self.layer, False, hidden_states)
        else:
            hidden_states = self.layer(hidden_states)
        logits, _ = self.output_layer(hidden_states, weight=self.word_embeddings.weight)
        loss = tensor_parallel.vocab_parallel_cross_entropy(
            logits, labels.transpose(0, 1).contiguous()
        )
        return loss.mean()


def train_step(
    tensor_size: int, sequence_parallel: bool, dtype: torch.dtype, recompute: bool = False
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of one step, and the whole gradients."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_size)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    config = ModelParallelConfig(
        tensor_model_parallel_size=tensor_size,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        params_dtype=dtype,
    )
    torch.manual_seed(1234)
    model = Model(config)
    data = None
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        generator = torch.Generator().manual_seed(7)
        text = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        data = {"tokens": text[:, :-1], "labels": text[:, 1:]}
    data = tensor_parallel.broadcast_data(["tokens", "labels"], data, torch.int64)
    loss = model(data["tokens"], data["labels"], recompute)
    loss.backward()

    group = parallel_state.get_tensor_model_parallel_group()
    grads = {}
    for name, param in model.named_parameters():
        grad = param.grad
        if getattr(param, "sequence_parallel", False):  # as finalize_model_grads does
            torch.distributed.all_reduce(grad, group=group)
        if getattr(param, "tensor_model_parallel", False):
            parts = [torch.empty_like(grad) for _ in range(tensor_size)]
            torch.distributed.all_gather(parts, grad, group=group)
            grad = torch.cat(parts, dim=param.partition_dim)
        grads[name] = grad
    duplicates = sum(
        not tensor_parallel.param_is_not_tensor_parallel_duplicate(param)
        for param in model.parameters()
    )
    assert duplicates == (0 if torch.distributed.get_rank(group) == 0 else 6)
    parallel_state.destroy_model_parallel()
    return loss.item(), grads
