"""An MLP written for megatron.core: the same names, on groups of braid.

braid run -n 2 examples/24_from_megatron.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from braid.compat.megatron import ModelParallelConfig, parallel_state, tensor_parallel

WIDTH, ROWS = 32, 8


class MLP(nn.Module):
    """As in Megatron, divided layers return their output, and the bias separately."""

    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__()
        options = {"config": config, "init_method": nn.init.xavier_normal_, "bias": True}
        self.up = tensor_parallel.ColumnParallelLinear(
            WIDTH, 4 * WIDTH, gather_output=False, **options
        )
        self.down = tensor_parallel.RowParallelLinear(
            4 * WIDTH, WIDTH, input_is_parallel=True, skip_bias_add=True, **options
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [rows, width] to the same shape."""
        y, bias = self.down(functional.gelu(self.up(x)[0]))
        return y + bias


def main() -> None:
    torch.distributed.init_process_group("braid")
    size = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    config = ModelParallelConfig(tensor_model_parallel_size=size, use_cpu_initialization=True)
    torch.manual_seed(0)
    model = MLP(config)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    y = model(x)
    y.square().mean().backward()

    torch.manual_seed(0)  # in one process: draw the same whole weights
    up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    torch.manual_seed(0)
    for layer in (up, down):
        nn.init.xavier_normal_(layer.weight)
        nn.init.zeros_(layer.bias)
    expected = down(functional.gelu(up(x)))
    expected.square().mean().backward()
    rank = parallel_state.get_tensor_model_parallel_rank()
    for shard, whole, dim in ((model.up.weight, up.weight, 0), (model.down.weight, down.weight, 1)):
        assert torch.equal(shard, whole.chunk(size, dim)[rank])
        gap = (shard.grad - whole.grad.chunk(size, dim)[rank]).abs().max()
        assert gap < 1e-6 * whole.grad.abs().max()
    torch.testing.assert_close(y, expected)
    if rank == 0:
        print(f"up {list(model.up.weight.shape)}, down {list(model.down.weight.shape)}")
        print("weights equal one process bit by bit, gradients up to rounding")
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
