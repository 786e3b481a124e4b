"""Megatron's optimizer on ranks: parameters, norms and states after steps are those of one process."""

from __future__ import annotations

import copy
from typing import Any

import megatron_gpt as gpt
import pytest
import torch
from test_megatron_pipeline import config_of, whole
from torch import nn
from torch_jobs import run
from training import said_by

from braid.compat.megatron import parallel_state
from braid.compat.megatron.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from braid.compat.megatron.optimizer import OptimizerConfig, get_megatron_optimizer

STEPS = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
LR, CLIP, DECAY = 0.01, 0.5, 0.1
Params = dict[str, torch.Tensor]


def by_hand() -> tuple[list[float], Params]:
    """Norms and parameters of a plain loop in one process."""
    (model,) = gpt.parts(config_of())
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    norms = []
    for numbers in STEPS:
        optimizer.zero_grad()
        for number in numbers:
            (gpt.mean_loss(model(**gpt.batch(number)))[0] / len(numbers)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(params, CLIP).item())
        optimizer.step()
    parallel_state.destroy_model_parallel()
    return norms, {name: p.detach() for name, p in model.named_parameters()}


def _model(
    tp: int, pp: int, options: dict[str, Any], sharded: bool
) -> tuple[DistributedDataParallel, gpt.GPTConfig]:
    config = config_of(tp, pp, **options)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=sharded, grad_reduce_in_fp32=True, overlap_grad_reduce=sharded
    )
    model = DistributedDataParallel(config, ddp_config, gpt.parts(config)[0])
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = model.no_sync
    return model, config


def _numbers(step: int) -> list[int]:
    rank = parallel_state.get_data_parallel_rank()
    return STEPS[step][rank :: parallel_state.get_data_parallel_world_size()]


def trained(
    tp: int, pp: int, options: dict[str, Any], sharded: bool, resumed: bool = False
) -> tuple[list[Any], Params]:
    """Results of steps and of a last one without gradients, and whole parameters before that.

    `resumed` goes on in new objects before each step except the first one.
    """
    model, config = _model(tp, pp, options, sharded)

    def made(model: DistributedDataParallel) -> Any:
        return get_megatron_optimizer(
            OptimizerConfig(
                lr=LR,
                weight_decay=DECAY,
                clip_grad=CLIP,
                use_distributed_optimizer=sharded,
                log_num_zeros_in_grad=True,
            ),
            [model],
        )

    optimizer, results = made(model), []
    for group in optimizer.param_groups:  # as Megatron's scheduler does
        group["weight_decay"] *= group["wd_mult"]
    for step in range(len(STEPS)):
        if resumed and step:
            states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model = DistributedDataParallel(config, model.ddp_config, gpt.parts(config)[0])
            config.no_sync_func = model.no_sync
            model.load_state_dict(states[0])
            optimizer = made(model)
            optimizer.load_state_dict(states[1])
        model.zero_grad_buffer()
        optimizer.zero_grad()
        gpt.run_schedule([model], _numbers(step))
        results.append(optimizer.step())
    params = {name: whole(param, param.detach()) for name, param in model.module.named_parameters()}
    model.zero_grad_buffer()
    results.append(optimizer.step())
    parallel_state.destroy_model_parallel()
    return results, params


WAYS = {  # tensor, pipeline and data parallel size, whether states are sharded
    "pp=2,tp=2": (2, 2, 1, False),
    "pp=2,dp=2, sharded": (1, 2, 2, True),
    "tp=2,dp=2, sharded": (2, 1, 2, True),
}


@pytest.mark.procs
def test_parameters_and_norms_are_those_of_one_process(pool, tmp_path):
    ((norms, expected),) = run(pool, tmp_path, 1, by_hand)
    for tp, pp, dp, sharded in WAYS.values():
        for results, params in run(pool, tmp_path, tp * pp * dp, trained, tp, pp, {}, sharded):
            assert results.pop() == (True, 0.0, sum(p.numel() for p in expected.values()))
            assert [norm for _, norm, _ in results] == pytest.approx(norms, rel=1e-12)
            for name, param in params.items():
                # Adam divides by the root of squared gradients: relative errors of small ones grow
                assert (param - expected[name]).abs().max() <= 1e-8, name


@pytest.mark.procs
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_shards_train_like_replicas_and_go_on_after_a_state_is_loaded(pool, tmp_path, dtype):
    options = {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": dtype == torch.bfloat16}
    runs = [
        run(pool, tmp_path, 4, trained, 1, 2, options, sharded, resumed)
        for sharded, resumed in ((False, False), (True, False), (True, True))
    ]
    for replicated, sharded, resumed in zip(*runs, strict=True):
        assert [norm for _, norm, _ in sharded[0]] == pytest.approx(
            [norm for _, norm, _ in replicated[0]], rel=1e-6
        )
        for name, param in replicated[1].items():
            close = 1e-12 if dtype == torch.float64 else 1e-2
            assert (sharded[1][name] - param).abs().max() <= close
            assert torch.equal(resumed[1][name], sharded[1][name])


def _with_torch(clear: bool) -> Params:
    """Parameters after steps of torch's optimizer, as in Megatron's minimal loop."""
    config = config_of(1, 2)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt.parts(config)[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for numbers in STEPS:
        optimizer.zero_grad()
        if clear:
            model.zero_grad_buffer()
        gpt.run_schedule([model], numbers)
        finalize_model_grads([model])
        optimizer.step()
    parallel_state.destroy_model_parallel()
    return {name: param.detach().clone() for name, param in model.module.named_parameters()}


@pytest.mark.procs
def test_an_optimizer_of_torch_steps_on_the_gradients_of_each_batch_alone(pool, tmp_path):
    ways = [run(pool, tmp_path, 2, _with_torch, clear) for clear in (False, True)]
    for params, cleared in zip(*ways, strict=True):
        assert all(torch.equal(params[name], cleared[name]) for name in cleared)
        numbers = [int(name.split(".")[1]) for name in params if name.startswith("layers")]
        (first,) = (name for name in params if name.endswith(f"{min(numbers)}.norm_1.weight"))
        assert not torch.equal(params[first], torch.ones_like(params[first]))


class _Sum(nn.Module):
    """Sum of the outputs of two layers, or the output of the first one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        return (self.a(x) + self.b(x) if both else self.a(x)).sum()


def _wrapped_sum(**options: bool) -> DistributedDataParallel:
    return DistributedDataParallel(config_of(), DistributedDataParallelConfig(**options), _Sum())


def _without_no_sync() -> tuple[str, torch.Tensor]:
    """Error of the backward of a second micro-batch, and a gradient of the next two."""
    model, x = _wrapped_sum(overlap_grad_reduce=True), torch.ones(2, 3)
    model(x).backward()
    text = said_by(model(x).backward, RuntimeError)
    model.finish_grad_sync()
    model.zero_grad_buffer()
    with model.no_sync():
        model(x).backward()
    model(x).backward()
    model.finish_grad_sync()
    grad = model.module.a.weight.main_grad.clone()
    parallel_state.destroy_model_parallel()
    return text, grad


@pytest.mark.procs
def test_a_gradient_that_a_reduction_would_miss_is_an_error(pool, tmp_path):
    for text, grad in run(pool, tmp_path, 2, _without_no_sync):
        assert "was computed after the reduction of its bucket had started" in text
        assert "set config.no_sync_func = model.no_sync" in text
        assert torch.equal(grad, torch.full((1, 3), 4.0))  # two rows in each of two micro-batches


def _unused_layer(overlap: bool) -> list[torch.Tensor]:
    """Gradients of both layers after a batch through both, and one through the first layer."""
    model, x = _wrapped_sum(overlap_grad_reduce=overlap), torch.ones(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for both in (True, False):
        optimizer.zero_grad()
        model(x, both).backward()
        model.finish_grad_sync()
        optimizer.step()
    grads = [layer.weight.grad.clone() for layer in (model.module.a, model.module.b)]
    parallel_state.destroy_model_parallel()
    return grads


@pytest.mark.procs
@pytest.mark.parametrize("overlap", [False, True])
def test_a_parameter_without_a_gradient_in_a_batch_has_zeros(pool, tmp_path, overlap):
    for used, unused in run(pool, tmp_path, 2, _unused_layer, overlap):
        assert torch.equal(used, torch.full((1, 3), 2.0))
        assert torch.equal(unused, torch.zeros(1, 3))


def _refused() -> list[str]:
    texts = []
    model, config = _model(1, 1, {}, True)
    for optimizer_config, chunks in (
        (OptimizerConfig(lr=LR), [model]),
        (OptimizerConfig(lr=LR), [model.module]),
        (OptimizerConfig(use_distributed_optimizer=True), [model]),
    ):
        with pytest.raises(RuntimeError) as error:
            get_megatron_optimizer(optimizer_config, chunks)
        texts.append(str(error.value))
    options = OptimizerConfig(lr=LR, use_distributed_optimizer=True)
    with pytest.raises(RuntimeError, match="for main parameters of sizes None"):
        get_megatron_optimizer(options, [model]).load_state_dict({})
    model.ddp_config.check_for_nan_in_grad = True
    model.module.layers["2"].norm_1.weight.data.fill_(torch.nan)
    with pytest.raises(RuntimeError, match=r"found NaN or Inf in local grad on rank 0.*layers.2.n"):
        gpt.run_schedule([model], [0])
    next(model.module.parameters()).allreduce = False
    with pytest.raises(RuntimeError, match="parameters of experts"):
        DistributedDataParallel(config, model.ddp_config, model.module)
    parallel_state.destroy_model_parallel()
    return texts


@pytest.mark.procs
def test_wrong_options_and_gradients_are_named(pool, tmp_path):
    ((differs, bare, rate),) = run(pool, tmp_path, 1, _refused)
    assert "use_distributed_optimizer is False in the OptimizerConfig and True in the" in differs
    assert "model chunk 0 is a GPT: wrap it in" in bare
    assert "OptimizerConfig has no lr: set it" in rate
