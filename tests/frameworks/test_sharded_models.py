"""Models of transformers are sharded as they are: the bits of one process, gradient checkpointing included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from braid import FullyShardedDataParallel
from braid.comm import Group
from braid.parallel.data_parallel.ddp.reference import accumulate

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
GPT2 = {"n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}
NO_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
T5 = {"num_layers": 2, "d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2, "vocab_size": 64}


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**GPT2, **NO_DROPOUT, bos_token_id=1, eos_token_id=1)
    )


def llama() -> Any:
    config = transformers.LlamaConfig(num_hidden_layers=3, num_key_value_heads=2, **SMALL)
    return transformers.LlamaForCausalLM(config)


def bert() -> Any:
    none = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    return transformers.BertForMaskedLM(
        transformers.BertConfig(num_hidden_layers=3, **none, **SMALL)
    )


def t5() -> Any:
    config = transformers.T5Config(**T5, dropout_rate=0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            num_hidden_layers=2, num_key_value_heads=2, num_local_experts=4, **SMALL
        )
    )


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(10 * rank + step))
    found: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return found


def _train(group: Group, base: Any, reentrant: bool | None, reshard: bool | None) -> Any:
    model = copy.deepcopy(base)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    sharded = FullyShardedDataParallel(model, group, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.01)
    for step in range(2):
        loss(sharded, group.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    sharded.eval()
    with torch.no_grad():
        last = loss(sharded, 0, 5).item()
    with sharded.gathered():
        return [param.detach().clone() for param in model.parameters()], last


@pytest.mark.parametrize(
    ("make", "reentrant", "reshard"),
    [
        (gpt2, None, None),
        (gpt2, False, True),
        (llama, True, None),
        (bert, None, True),
        (t5, None, None),
        (mixtral, None, True),
    ],
)
def test_a_model_is_sharded_to_the_bit(
    world, make: Callable[[], Any], reentrant: bool | None, reshard: bool | None
):
    torch.manual_seed(0)
    base = make().train()
    alone = copy.deepcopy(base)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    for step in range(2):
        accumulate(alone, [partial(loss, alone, rank, step) for rank in range(2)])
        optimizer.step()
        optimizer.zero_grad()
    alone.eval()
    with torch.no_grad():
        expected = loss(alone, 0, 5).item()
    for params, last in world(2, _train, base, reentrant, reshard):
        assert last == expected
        assert all(
            torch.equal(a, b.detach()) for a, b in zip(params, alone.parameters(), strict=True)
        )
