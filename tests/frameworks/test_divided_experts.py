"""Unmodified mixtures of experts of transformers, divided over two ranks, against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched import last_line

pytestmark = [pytest.mark.frameworks, pytest.mark.proof]
pytest.importorskip("transformers")

PROGRAM = """
import copy
import sys
import torch
import transformers as hf
import braid
from braid.parallel.expert_parallel import average_gradients, divide_experts, is_of_experts, undivide_experts

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False,
         "experts_implementation": sys.argv[2]}
MODELS = {
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SMALL, num_local_experts=4)),
    "qwen2_moe": lambda: hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
                          shared_expert_intermediate_size=24)
    ),
}
torch.set_num_threads(1)
group = braid.init()
torch.manual_seed(0)
model = MODELS[sys.argv[1]]().to(torch.float64 if sys.argv[2] == "eager" else torch.float32)
ids = [torch.randint(96, (2, 9), generator=torch.Generator().manual_seed(r)) for r in range(2)]
whole = copy.deepcopy(model)
expected = [whole(input_ids=x).logits for x in ids]
torch.stack([x.square().sum() for x in expected]).mean().backward()
assert len(divide_experts(model, group)) == 2
logits = model(input_ids=ids[group.rank]).logits
assert (logits - expected[group.rank]).abs().max() <= 2e-6 * logits.abs().max()
logits.square().sum().backward()
average_gradients(model, group)
largest = max(p.grad.abs().max() for p in whole.parameters())
for (path, own), param in zip(model.named_parameters(), whole.parameters(), strict=True):
    grad = param.grad.chunk(2)[group.rank] if is_of_experts(own) else param.grad
    assert (own.grad - grad).abs().max() <= 2e-6 * largest, path
undivide_experts(model, group)
for own, param in zip(model.parameters(), whole.parameters(), strict=True):
    assert torch.equal(own, param)
print("equal")
"""


@pytest.mark.parametrize(
    ("model", "implementation"),
    [("mixtral", "eager"), ("mixtral", "grouped_mm"), ("qwen2_moe", "eager")],
)
def test_experts_of_a_model_of_transformers_are_divided(
    model: str, implementation: str, tmp_path: Path
) -> None:
    assert last_line(tmp_path, PROGRAM, model, implementation) == "equal"
