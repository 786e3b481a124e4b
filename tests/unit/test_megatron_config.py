"""Megatron's configuration and names: what is there, and what is refused by name."""

from __future__ import annotations

import pytest
import torch

from braid.compat import megatron
from braid.compat.megatron import ModelParallelConfig, mpu, parallel_state, tensor_parallel
from braid.compat.megatron.failure import UnsupportedError, UsageError
from braid.compat.megatron.model_parallel_config import REFUSED


def test_values_that_are_left_out_follow_from_the_others():
    config = ModelParallelConfig(
        tensor_model_parallel_size=2, params_dtype=torch.bfloat16, sequence_parallel=True
    )
    assert config.expert_tensor_parallel_size == 2
    assert config.autocast_dtype == torch.bfloat16
    assert config.microbatch_group_size_per_vp_stage == 1


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_cannot_be_served_says_what_to_do(name):
    with pytest.raises(UnsupportedError, match=f"{name}=True: leave it False") as error:
        ModelParallelConfig(**{name: True})
    assert isinstance(error.value, NotImplementedError)


def test_contradictions_are_named_together():
    with pytest.raises(UsageError) as error:
        ModelParallelConfig(
            sequence_parallel=True,
            pipeline_model_parallel_size=2,
            overlap_p2p_comm_warmup_flush=True,
        )
    text = str(error.value)
    assert "at least 2, got 1" in text
    assert "needs a pipeline_dtype" in text
    assert "batch_p2p_comm=False" in text
    with pytest.warns(UserWarning, match="needs sequence_parallel=True"):
        ModelParallelConfig(expert_model_parallel_size=2, tensor_model_parallel_size=2)


def test_names_are_those_of_megatron_or_say_what_to_use():
    assert mpu is parallel_state
    assert megatron.__version__ == "0.16.1"
    for module in (parallel_state, tensor_parallel):
        assert sorted(module.__all__) == sorted(set(module.__all__))
        assert all(hasattr(module, name) for name in module.__all__)
    with pytest.raises(AttributeError, match="use RowParallelLinear"):
        tensor_parallel.InferenceRowParallelLinear  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        tensor_parallel.nothing  # noqa: B018


def test_parts_of_tensors_need_no_ranks():
    x = torch.arange(12.0).view(2, 6)
    first, second = tensor_parallel.split_tensor_along_last_dim(x, 2)
    assert first.data_ptr() == x.data_ptr()
    assert second.tolist() == [[3, 4, 5], [9, 10, 11]]
    copies = tensor_parallel.split_tensor_along_last_dim(x, 3, contiguous_split_chunks=True)
    assert all(part.is_contiguous() for part in copies)
    assert tensor_parallel.divide(6, 3) == 2
    with pytest.raises(AssertionError, match="6 is not divisible by 4"):
        tensor_parallel.divide(6, 4)
    utility = tensor_parallel.VocabUtility
    assert utility.vocab_range_from_per_partition_vocab_size(5, 2, 4) == (10, 15)


def test_a_tracker_keeps_states_by_name():
    tracker = tensor_parallel.CudaRNGStatesTracker()
    assert not tracker.is_initialized()
    before = torch.get_rng_state()
    tracker.add("a", 1)
    tracker.add("b", 2)
    states = tracker.get_states()
    with tracker.fork("a"):
        first = torch.rand(3)
    assert torch.equal(first, torch.rand(3, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.get_rng_state(), before)
    tracker.set_states(states)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3), first)
    tracker.reset()
    assert not tracker.is_initialized()
    for make, text in (
        (lambda: tensor_parallel.CudaRNGStatesTracker(use_cudagraphable_rng=True), "leave it out"),
        (lambda: tensor_parallel.convert_cuda_rng_state(before, to_graphable=True), "are tensors"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            make()
    generator = torch.Generator().manual_seed(3)
    assert torch.equal(tensor_parallel.convert_cuda_rng_state(generator), generator.get_state())
    silent = tensor_parallel.CudaRNGStatesTracker(is_inference_rng_tracker=True)
    silent.add("a", 1)
    with silent.fork("nothing"):
        assert not silent.get_states()
