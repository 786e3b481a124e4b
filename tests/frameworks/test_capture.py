"""Unmodified models of Hugging Face and timm are captured, and their replay in parts equals them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from braid.autograd.nested import tensors_in
from braid.graph import capture, segments

pytestmark = pytest.mark.frameworks
transformers = pytest.importorskip("transformers")

TEXT = {"vocab_size": 99, "use_cache": False}
MODELS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=4, n_head=2, n_embd=16, bos_token_id=1, eos_token_id=2, **TEXT)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, **TEXT
        )
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, vocab_size=99
        )
    ),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
            image_size=16, patch_size=4, num_labels=5,
        )
    ),
}  # fmt: skip


def _example(name: str, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    if name == "vit":
        return torch.randn(rows, 3, 16, 16, generator=generator)
    return torch.randint(0, 99, (rows, 7), generator=generator)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("trains", [False, True])
def test_the_replay_in_two_parts_equals_the_model(name, trains):
    model = MODELS[name]().train(trains)
    graph = capture(model, _example(name, 4))
    for rows in (2, 5):
        value: Any = (_example(name, rows),)
        torch.manual_seed(0)
        for part in segments(graph, 2):
            value = part(value)
        torch.manual_seed(0)
        expected = model(_example(name, rows))
        assert type(value) is type(expected)
        assert all(map(torch.equal, tensors_in(value), tensors_in(expected)))
