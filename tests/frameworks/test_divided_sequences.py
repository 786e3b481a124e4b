"""Unmodified models of transformers on sequences divided over ranks, against one process."""

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
from braid.parallel.context_parallel import context_parallel, gather_sequence

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SMALL, "num_key_value_heads": 2, "attn_implementation": "sdpa"}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)),
    "llama_tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, tie_word_embeddings=True)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**DECODER)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
                      attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, attn_implementation="sdpa")
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL, attn_implementation="sdpa")).eval(),
}
torch.set_num_threads(1)
group = braid.init()
name, way = sys.argv[1:]
torch.manual_seed(0)
model = MODELS[name]().double().train(name != "bert")
ids = torch.randint(96, (2, 12 * group.size), generator=torch.Generator().manual_seed(1))
labels = ids.masked_fill(torch.arange(ids.shape[1]) < 7, -100)
inputs = {"input_ids": ids, "use_cache": False} if name != "bert" else {"input_ids": ids}
if name != "bert":
    inputs["labels"] = labels
whole = copy.deepcopy(model)
expected = whole(**inputs)
# transformers rounds logits to float32 before its loss
mean = torch.nn.functional.cross_entropy(expected.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
(mean if name != "bert" else expected.logits.square().mean()).backward()
context_parallel(model, group, attention=way)
exact = 1e-13 if name in {"gpt2", "bert"} else 1e-6  # norms of the others round to float32
out = model(**inputs)
logits = gather_sequence(group, out.logits)
gap = (logits - expected.logits).abs().max() / expected.logits.abs().max()
assert gap <= (1e-12 if name in {'gpt2', 'bert'} else 1e-6), gap
if name != "bert":
    assert abs(out.loss - mean) <= exact * mean
    assert abs(out.loss - expected.loss) <= 1e-6 * mean
(out.loss if name != "bert" else logits.square().mean()).backward()
largest = max(p.grad.abs().max() for p in whole.parameters() if p.grad is not None)
for (path, own), param in zip(model.named_parameters(), whole.parameters(), strict=True):
    if param.grad is not None:
        grad = group.all_reduce(own.grad, op="avg")
        gap = (grad - param.grad).abs().max() / largest
        assert gap <= exact, (path, gap)
print("equal")
"""


@pytest.mark.parametrize(
    ("model", "way", "size"),
    [
        ("llama", "ring", 2),
        ("llama", "all_to_all", 2),
        ("llama_tied", "ring", 3),
        ("qwen2", "ring", 2),
        ("gpt2", "ring", 2),
        ("gpt2", "all_to_all", 4),
        ("bert", "ring", 2),
    ],
)
def test_a_model_of_transformers_runs_on_divided_sequences(
    model: str, way: str, size: int, tmp_path: Path
) -> None:
    assert last_line(tmp_path, PROGRAM, model, way, ranks=size) == "equal"


REFUSED = """
import torch
import transformers as hf
import braid
from braid.parallel.context_parallel import context_parallel

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}
group = braid.init()
ids = torch.zeros(2, 16, dtype=torch.int64)


def said_by(model, **inputs):
    context_parallel(model, group)
    try:
        model(input_ids=ids, **inputs)
    except braid.ConfigError as exc:
        return str(exc)


window = hf.MistralForCausalLM(hf.MistralConfig(**SMALL, sliding_window=8))
assert "has attention within windows of 8 of 16 positions" in said_by(window)
window = hf.MistralForCausalLM(hf.MistralConfig(**SMALL, sliding_window=16))
assert said_by(window) is None
some = hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=4))
assert "has layers of sliding_attention within windows of 4" in said_by(some)
llama = hf.LlamaConfig(**SMALL, attn_implementation="eager")
assert 'attn_implementation="sdpa"' in said_by(hf.LlamaForCausalLM(llama))
mask = torch.ones_like(ids)
mask[0, -1] = 0
assert "put padding behind the sequences" in said_by(
    hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)), attention_mask=mask
)
bert = hf.BertForMaskedLM(hf.BertConfig(vocab_size=96, hidden_size=32, intermediate_size=64,
                                        num_hidden_layers=1, num_attention_heads=4)).eval()
assert "the loss of BertForMaskedLM is not supported" in said_by(bert, labels=ids)
print("refused")
"""


def test_models_whose_attention_is_not_divided_are_refused(tmp_path: Path) -> None:
    assert last_line(tmp_path, REFUSED) == "refused"


HYBRID = """
import copy
import torch
import transformers as hf
import braid
from braid.parallel.context_parallel import context_parallel
from braid.parallel.tensor_parallel import slicing_of

torch.set_num_threads(1)
mesh = braid.mesh("tp=2,cp=2")
layers, sequences = mesh["tp"], mesh["cp"]
torch.manual_seed(0)
model = hf.LlamaForCausalLM(
    hf.LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                   num_attention_heads=4, num_key_value_heads=2)
)
ids = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(1))
whole = copy.deepcopy(model)
expected = whole(input_ids=ids, labels=ids).loss
expected.backward()
braid.parallelize(model, layers)
context_parallel(model, sequences)
loss = model(input_ids=ids, labels=ids).loss
loss.backward()
assert abs(loss - expected) <= 1e-6 * expected
for own, param in zip(model.parameters(), whole.parameters(), strict=True):
    slicing = slicing_of(own)
    grad = param.grad if slicing is None else slicing.part_of(param.grad, layers.rank, 2)
    average = sequences.all_reduce(own.grad, op="avg")
    assert (average - grad).abs().max() <= 2e-6 * param.grad.abs().max()
print("equal")
"""


def test_layers_and_sequences_are_divided_at_the_same_time(tmp_path: Path) -> None:
    assert last_line(tmp_path, HYBRID, ranks=4) == "equal"
