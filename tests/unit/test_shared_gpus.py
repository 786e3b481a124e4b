"""Claims about ranks that share a GPU, from NCCL's text."""

from __future__ import annotations

import pytest

from braid.comm.engines.diagnostics import shared_gpu_error
from braid.comm.torch_backend.foreign import ExplainedGroup
from braid.errors import ConfigError

# of torch 2.11 with NCCL 2.28
TEXT = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 60"""


class Refusing:
    """A process group that raises."""

    def __init__(self, text: str) -> None:
        self.text = text

    def allreduce(self, tensors: list[object]) -> None:
        assert tensors == []
        raise RuntimeError(self.text)


def test_global_ranks_and_what_to_do_are_named():
    error = shared_gpu_error(TEXT, (4, 7))
    assert isinstance(error, ConfigError)
    assert str(error).startswith("ranks 4 and 7 are both on the GPU at PCI bus 60, and NCCL needs")
    assert "torch.cuda.set_device(local_rank)" in str(error)


def test_other_errors_of_nccl_stay_as_they_are():
    assert shared_gpu_error(TEXT.partition("Last")[0], (4, 7)) is None
    with pytest.raises(RuntimeError, match="unhandled system error"):
        ExplainedGroup(Refusing("unhandled system error"), (0, 1)).allreduce([])


def test_a_group_of_torch_raises_it_with_its_own_as_the_cause():
    with pytest.raises(ConfigError, match="ranks 0 and 1 are both") as caught:
        ExplainedGroup(Refusing(TEXT), (0, 1)).allreduce([])
    assert isinstance(caught.value.__cause__, RuntimeError)
