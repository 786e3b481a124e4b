"""Megatron's options of training: what is refused by name, and the number of micro-batches."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from braid.compat.megatron import num_microbatches_calculator as calculator
from braid.compat.megatron.distributed import DistributedDataParallelConfig, finalize_model_grads
from braid.compat.megatron.distributed.distributed_data_parallel import buckets_of
from braid.compat.megatron.failure import GroupNotInitializedError, UnsupportedError, UsageError
from braid.compat.megatron.optimizer import OptimizerConfig
from braid.compat.megatron.pipeline_parallel import get_forward_backward_func, schedules
from braid.compat.megatron.process_groups_config import ProcessGroupCollection
from braid.compat.megatron.utils import get_attr_wrapped_model, timed


@pytest.fixture
def _no_calculator():
    yield
    calculator.destroy_num_microbatches_calculator()


@pytest.mark.usefixtures("_no_calculator")
def test_the_number_of_microbatches_is_constant_or_grows_in_steps():
    with pytest.raises(GroupNotInitializedError, match="call init_num_microbatches_calculator"):
        calculator.get_num_microbatches()
    calculator.init_num_microbatches_calculator(0, None, 32, 2, 4)
    assert calculator.get_num_microbatches() == 4
    with pytest.raises(UsageError, match="already initialized"):
        calculator.init_num_microbatches_calculator(0, None, 32, 2, 4)
    calculator.reconfigure_num_microbatches_calculator(0, [8, 8, 60], 32, 2, 4)
    sizes = {}
    for samples in (0, 19, 20, 40, 60, 61):
        calculator.update_num_microbatches(samples)
        sizes[samples] = calculator.get_current_global_batch_size()
        assert calculator.get_num_microbatches() == sizes[samples] // 8
    assert sizes == {0: 8, 19: 8, 20: 16, 40: 24, 60: 32, 61: 32}
    calculator.reconfigure_num_microbatches_calculator(0, None, 30, 2, 4, True)
    assert calculator.get_current_running_global_batch_size() == 24
    assert (calculator.get_num_microbatches(), calculator.get_micro_batch_size()) == (3, 2)


@pytest.mark.usefixtures("_no_calculator")
@pytest.mark.parametrize(
    ("rampup", "batch", "words"),
    [
        (None, 30, "global batch size (30) is not divisible by micro batch size (2) times"),
        (None, 0, "number of microbatches should be at least 1, got 0"),
        ([8, 8], 32, "expected the following format"),
        ([8, 5, 60], 32, "interval (24) to be divisible by global batch size increment (5)"),
        ([64, 8, 60], 32, "greater than or equal to start batch size, got 32 and 64"),
        ([0, 8, -1], 32, "start batch size should be positive, got 0"),
    ],
)
def test_batches_without_whole_microbatches_are_refused(rampup, batch, words):
    with pytest.raises(AssertionError) as error:
        calculator.init_num_microbatches_calculator(0, rampup, batch, 2, 4)
    assert words in str(error.value)


def test_the_schedule_depends_on_the_numbers_of_ranks_and_chunks():
    plain, interleaved = (
        schedules.forward_backward_pipelining_without_interleaving,
        schedules.forward_backward_pipelining_with_interleaving,
    )
    assert get_forward_backward_func(1) is schedules.forward_backward_no_pipelining
    assert get_forward_backward_func(2) is plain
    assert get_forward_backward_func(2, 2) is interleaved


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DistributedDataParallelConfig(use_megatron_fsdp=True), "use_megatron_fsdp=True"),
        (
            lambda: DistributedDataParallelConfig(data_parallel_sharding_strategy="optim"),
            "data_parallel_sharding_strategy='optim' is not supported",
        ),
        (
            lambda: DistributedDataParallelConfig(num_distributed_optimizer_instances=2),
            "num_distributed_optimizer_instances=2 is not supported",
        ),
        (lambda: OptimizerConfig(fp16=True), "fp16=True: set bf16=True"),
        (lambda: OptimizerConfig(optimizer="muon"), "muon optimizer is not supported"),
    ],
)
def test_options_that_are_not_supported_are_refused_by_name(make, words):
    with pytest.raises(UnsupportedError) as error:
        make()
    assert words in str(error.value)


def test_attributes_are_found_in_wrapped_modules():
    inner = nn.Linear(1, 1)
    wrapper = nn.Module()
    wrapper.module = inner
    assert get_attr_wrapped_model(wrapper, "in_features") == 1
    assert get_attr_wrapped_model(wrapper, "in_features", return_model_obj=True) is inner
    with pytest.raises(RuntimeError, match="couldn't find attribute config: define it in Linear"):
        get_attr_wrapped_model(wrapper, "config")


def test_a_timer_stops_if_its_block_raises():
    timer = Mock()
    with pytest.raises(LookupError), timed(SimpleNamespace(timers=lambda *_, **__: timer), "step"):
        raise LookupError
    timer.start.assert_called_once_with()
    timer.stop.assert_called_once_with()


def test_a_collection_of_groups_names_the_group_that_it_lacks():
    with pytest.raises(UsageError, match="unknown groups tq: pass some of tp, pp"):
        ProcessGroupCollection(tq=None)
    with pytest.raises(AttributeError, match="pg_collection must have a pp"):
        _ = ProcessGroupCollection(tp=None).pp
    model = nn.Linear(1, 1)
    model.config = object()
    with pytest.raises(UsageError, match="a model chunk is a Linear"):
        finalize_model_grads([model], None, ProcessGroupCollection())


def test_buckets_go_backwards_and_a_shared_weight_may_be_alone():
    params = [
        nn.Parameter(torch.zeros(n, dtype=d)) for n, d in zip((3, 4, 5, 6), TYPES, strict=True)
    ]
    numels = [[p.numel() for p in bucket] for bucket in buckets_of(params, 8, alone=True)]
    assert numels == [[6, 3], [5, 4]]
    params[0].shared_embedding = True
    numels = [[p.numel() for p in bucket] for bucket in buckets_of(params, None, alone=True)]
    assert numels == [[3], [5, 4], [6]]
    numels = [[p.numel() for p in bucket] for bucket in buckets_of(params, 5, alone=False)]
    assert numels == [[6], [3], [5], [4]]


TYPES = (torch.float32, torch.float64, torch.float64, torch.float32)
