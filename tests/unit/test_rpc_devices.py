"""Claims of braid.rpc.options: where tensors of remote calls arrive."""

from __future__ import annotations

import pytest
import torch

from braid.rpc.options import placed
from braid.rpc.outcomes import RpcError


def test_a_map_to_a_gpu_that_the_receiver_lacks_names_the_sender():
    with pytest.raises(RpcError, match=r"w0 maps a tensor to cuda:99, .* has \d+ GPUs: correct"):
        placed(torch.ones(2), "cuda:99", "w0")


def test_a_recorded_tensor_keeps_its_graph_in_a_thread_without_gradients():
    x = torch.ones(2, requires_grad=True)
    recorded = x * 2
    with torch.no_grad():
        found = placed(recorded, "cpu", "w0")
    found.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("requires_grad", [False, True])
def test_another_tensor_stays_a_leaf(requires_grad):
    found = placed(torch.ones(2).requires_grad_(requires_grad), "cpu", "w0")
    assert (found.is_leaf, found.requires_grad) == (True, requires_grad)
