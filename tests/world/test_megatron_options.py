"""Options of Megatron's layers, experts, and its groups under two wrappers for data parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch_jobs import run

import braid
from braid.compat.megatron import ModelParallelConfig, parallel_state, tensor_parallel
from braid.parallel.tensor_parallel import clip_grad_norm_

CONFIG = ModelParallelConfig(use_cpu_initialization=True, params_dtype=torch.float64)
Column, Row = tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normal(x: torch.Tensor) -> torch.Tensor:
    return nn.init.normal_(x, generator=torch.Generator().manual_seed(x.numel()))


def row(inputs: int, outputs: int, **options: Any) -> Row:
    given: dict[str, Any] = {"bias": True, "input_is_parallel": True, "skip_bias_add": True}
    return Row(inputs, outputs, config=CONFIG, init_method=normal, **given | options)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= 1e-13 * theirs.abs().max())


def _options() -> list[bool]:
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    group = parallel_state.get_tensor_model_parallel_group()
    rank = group.rank()

    def summed(x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    layer = Column(
        6,
        12,
        config=CONFIG,
        init_method=normal,
        disable_grad_reduce=True,
        keep_master_weight_for_test=True,
        tp_group=group,
    )
    whole, x = layer.master_weight, drawn(4, 2, 6).requires_grad_()
    gathered, _ = layer(x, runtime_gather_output=True)
    part, _ = layer(x)
    scale = drawn(4, 2, 12)
    (part * scale.chunk(size, -1)[rank]).sum().backward()
    facts = [
        close(gathered, functional.linear(x, whole)),
        torch.equal(part, gathered.chunk(size, -1)[rank]),
        close(summed(x.grad), scale @ whole),  # each rank has its term
    ]
    # a weight that is not trained has no gradient; that of the input is added over ranks
    frozen = Column(6, 12, config=CONFIG, init_method=normal)
    frozen.weight.requires_grad_(False)
    x = drawn(4, 2, 6).requires_grad_()
    (frozen(x)[0] * scale.chunk(size, -1)[rank]).sum().backward()
    facts += [frozen.weight.grad is None, close(x.grad, scale @ whole)]
    # embeddings: both ways of looking rows up, and the positions of a rank
    ids = torch.tensor([[0, 11, 4, 4], [7, 3, 11, 0]])
    rows = []
    for config, scattered in (
        (CONFIG, False),
        (
            ModelParallelConfig(
                use_cpu_initialization=True, params_dtype=torch.float64, deterministic_mode=True
            ),
            False,
        ),
        (CONFIG, True),
    ):
        embedding = tensor_parallel.VocabParallelEmbedding(
            12, 5, init_method=normal, reduce_scatter_embeddings=scattered, config=config
        )
        rows.append(embedding(ids))
        weights = drawn(2, 4, 5)
        if scattered:
            weights = weights.transpose(0, 1).chunk(size)[rank]
        (rows[-1] * weights).sum().backward()
        table, grads = (
            torch.zeros(12, 5, dtype=torch.float64),
            torch.zeros(12, 5, dtype=torch.float64),
        )
        normal(master := torch.empty(12, 5))
        table.copy_(master)
        grads.index_add_(0, ids.flatten(), drawn(2, 4, 5).flatten(0, 1))
        facts.append(close(embedding.weight.grad, grads.chunk(size)[rank]))
    facts += [
        close(rows[0], table[ids]),
        close(rows[1], table[ids]),
        close(rows[2], table[ids].transpose(0, 1).chunk(size)[rank]),
    ]
    parallel_state.destroy_model_parallel()
    return facts


@pytest.mark.procs
@pytest.mark.parametrize("size", [1, 2, 4])
def test_options_of_layers_do_what_they_say(pool, tmp_path, size):
    for facts in run(pool, tmp_path, size, _options):
        assert all(facts), facts


def _experts(expert_size: int) -> Any:
    """Layers of experts leave communication to whoever moves the tokens."""
    parallel_state.initialize_model_parallel(
        2, expert_model_parallel_size=2, expert_tensor_parallel_size=expert_size
    )
    tensor_parallel.model_parallel_cuda_manual_seed(11)
    config = ModelParallelConfig(
        use_cpu_initialization=True, params_dtype=torch.float64, expert_model_parallel_size=2
    )
    group = parallel_state.get_expert_tensor_parallel_group()
    up = Column(
        6,
        8,
        config=config,
        init_method=normal,
        is_expert=True,
        bias=False,
        keep_master_weight_for_test=True,
    )
    down = Row(
        8,
        6,
        config=config,
        init_method=normal,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
        is_expert=True,
        keep_master_weight_for_test=True,
    )
    x = drawn(5, 6).requires_grad_()
    y, _ = down(up(x)[0])
    before = y.detach().clone()
    (y * drawn(5, 6, seed=1)).sum().backward()
    terms = [before, x.grad]
    for term in terms:
        dist.all_reduce(term, group=group)
    product = down.master_weight @ up.master_weight
    own = ModelParallelConfig(params_dtype=torch.float64, expert_model_parallel_size=2)
    drawn_here = (
        Column(4, 4, config=own, init_method=nn.init.normal_, is_expert=True).weight.sum().item()
    )
    facts = [
        group.size() == expert_size,
        up.weight.allreduce is False,
        close(terms[0], drawn(5, 6) @ product.T),
        close(terms[1], drawn(5, 6, seed=1) @ product),
    ]
    parallel_state.destroy_model_parallel()
    return facts, drawn_here


@pytest.mark.procs
@pytest.mark.parametrize("expert_size", [1, 2])
def test_layers_of_experts_leave_sums_to_the_caller(pool, tmp_path, expert_size):
    results = run(pool, tmp_path, 4, _experts, expert_size)
    assert all(all(facts) for facts, _ in results), results
    sums = [value for _, value in results]
    # experts are drawn by their ranks in expert and expert tensor groups
    assert len(set(sums)) == 2 * expert_size


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = Column(6, 12, config=CONFIG, init_method=normal)
        self.down = row(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, bias = self.down(functional.gelu(self.up(x)[0]))
        return y + bias


def _wrapped(wrapper: str) -> Any:
    """A step of a 2 x 2 grid, and the norm of gradients over tensor parallel ranks."""
    tensor_size = min(2, dist.get_world_size())
    parallel_state.initialize_model_parallel(tensor_size)
    data_group = parallel_state.get_data_parallel_group()
    block = _Block()
    if wrapper == "torch":
        model = nn.parallel.DistributedDataParallel(block, process_group=data_group)
    else:
        model = braid.DistributedDataParallel(block, process_group=data_group.braid_group)
    x = drawn(8, 6).chunk(data_group.size())[data_group.rank()]
    model(x).square().mean().backward()
    group = block.up.group
    grads = {}
    for name, param in block.named_parameters():
        grad = param.grad.clone()
        if getattr(param, "tensor_model_parallel", False):
            parts = group.all_gather(grad.unsqueeze(0))
            grad = torch.cat(list(parts), param.partition_dim)
        grads[name] = grad
    norm = clip_grad_norm_(block, 1e9, group)
    del model
    parallel_state.destroy_model_parallel()
    return grads, norm.item()


@pytest.mark.procs
@pytest.mark.parametrize("wrapper", ["torch", "braid"])
def test_divided_layers_train_under_data_parallelism(pool, tmp_path, wrapper):
    ((expected, expected_norm),) = run(pool, tmp_path, 1, _wrapped, wrapper)
    for grads, norm in run(pool, tmp_path, 4, _wrapped, wrapper):
        assert norm == pytest.approx(expected_norm, rel=1e-12)
        assert all(close(grad, expected[name]) for name, grad in grads.items())
