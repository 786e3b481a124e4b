"""Unmodified models of transformers, divided over two ranks, against one process."""

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
from braid.parallel.tensor_parallel import slicing_of
from braid.parallel.tensor_parallel.insertion.explain import totals

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SMALL, "num_key_value_heads": 2, "use_cache": False}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)),
    "llama_tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, tie_word_embeddings=True)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**DECODER)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**DECODER)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0, use_cache=False)
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    ),
    "vit": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16,
                     patch_size=4, num_labels=5)
    ),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(vocab_size=96, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
                     word_embed_proj_dim=32, max_position_embeddings=64)
    ),
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4)),
    "neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SMALL, max_position_embeddings=64)),
}
CACHES = {"t5", "opt", "bloom", "neox"}
ALL_REDUCES = {"t5": (13, 12), "vit": (4, 4)}  # forward and backward; others: 2 a layer, embedding and head


def inputs(name):
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        images = torch.randn(3, 3, 16, 16, dtype=torch.float64, generator=generator)
        return {"pixel_values": images, "labels": torch.tensor([0, 1, 2])}
    ids = torch.randint(96, (2, 9), generator=generator)
    return {"input_ids": ids, "labels": ids, **({"use_cache": False} if name in CACHES else {})}


torch.set_num_threads(1)
group = braid.init()
name = sys.argv[1]
torch.manual_seed(0)
model = MODELS[name]().eval().double()
whole = copy.deepcopy(model)
expected = whole(**inputs(name)).loss
expected.backward()
by_graph = len(sys.argv) > 2
tolerance = 1e-6 if by_graph else 1e-13  # a loss of divided logits is float32 in these models
if by_graph:
    model.train()
    whole.train()
    whole.zero_grad()
    torch.manual_seed(7)
    expected = whole(**inputs(name)).loss
    expected.backward()
    torch.manual_seed(7)
found = braid.parallelize(model, group, inputs=inputs(name) if by_graph else None)
counts = [group.statistics()["num_operations"]]
loss = model(**inputs(name)).loss
counts.append(group.statistics()["num_operations"])
loss.backward()
counts.append(group.statistics()["num_operations"])
assert abs(loss - expected) <= tolerance * abs(expected), (loss, expected)
largest = max(p.grad.abs().max() for p in whole.parameters())
num_divided = 0
for (path, own), param in zip(model.named_parameters(), whole.parameters(), strict=True):
    slicing = slicing_of(own)
    num_divided += slicing is not None
    grad = param.grad if slicing is None else slicing.part_of(param.grad, group.rank, group.size)
    assert (own.grad - grad).abs().max() <= tolerance * largest, path
assert num_divided >= (4 if name == "bloom" else 8), num_divided  # its heads are packed with the batch
forward, backward = counts[1] - counts[0], counts[2] - counts[1]
if by_graph:
    sums = totals(found.rows)
    assert (forward, backward) == (sums.forward.total(), sums.backward.total()), (forward, backward, sums)
else:
    assert (forward, backward) == ALL_REDUCES.get(name, (6, 5)), (forward, backward)
print("equal")
"""


MODELS = ("llama", "llama_tied", "mistral", "qwen2", "gpt2", "bert", "t5", "vit")
WITHOUT_A_PLAN = ("opt", "bloom", "neox")


@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_transformers_is_divided_unmodified(model: str, tmp_path: Path) -> None:
    assert last_line(tmp_path, PROGRAM, model) == "equal"


@pytest.mark.parametrize("model", [*MODELS, *WITHOUT_A_PLAN])
def test_a_model_of_transformers_is_divided_by_its_graph(model: str, tmp_path: Path) -> None:
    assert last_line(tmp_path, PROGRAM, model, "graph") == "equal"
