"""Unmodified models of transformers on a mesh, against one process."""

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
from braid.parallel.hybrid import HybridParallel

torch.set_num_threads(1)
group = braid.init()
name, mesh, shard = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
if name == "llama":
    config = hf.LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
                            num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    model = hf.LlamaForCausalLM(config)
else:
    config = hf.GPT2Config(vocab_size=96, n_embd=32, n_layer=4, n_head=4, use_cache=False, resid_pdrop=0,
                           embd_pdrop=0, attn_pdrop=0)
    model = hf.GPT2LMHeadModel(config)
model = model.double().train()
whole = copy.deepcopy(model)
ids = torch.randint(96, (4, 8), generator=torch.Generator().manual_seed(1))


def loss_of(output, target):
    return torch.nn.functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
reference = torch.optim.AdamW(whole.parameters(), lr=1e-2)
graph = braid.capture(model, ids)
hybrid = HybridParallel(model, mesh, group, layers=graph, num_microbatches=2, shard=shard)
hybrid.attach(optimizer)
mine = ids.chunk(hybrid.samples.size)[hybrid.samples.rank]
for _ in range(3):
    hybrid.zero_grad()
    reference.zero_grad()
    loss = hybrid.step(mine, mine, loss=loss_of)
    expected = loss_of(whole(ids), ids)
    expected.backward()
    norm = hybrid.clip_grad_norm_(0.5)
    wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
    assert abs(loss - expected.detach()) <= 1e-12, (loss, expected)
    assert abs(norm - wanted) <= 1e-11, (norm, wanted)
    optimizer.step()
    reference.step()
print("equal")
"""


@pytest.mark.parametrize(
    ("model", "mesh", "shard"),
    [
        ("llama", "pp=2,tp=2", "0"),
        ("llama", "pp=2,dp=2", "2"),
        ("llama", "dp=2,tp=2", "3"),
        ("gpt2", "pp=2,tp=2", "0"),
        ("gpt2", "pp=2,dp=2", "3"),
    ],
)
def test_a_model_of_transformers_is_trained_on_a_mesh(
    model: str, mesh: str, shard: str, tmp_path: Path
) -> None:
    assert last_line(tmp_path, PROGRAM, model, mesh, shard, ranks=4) == "equal"
