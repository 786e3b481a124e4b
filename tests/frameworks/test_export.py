"""Exported checkpoints are read by Hugging Face and by torch, with tied weights."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import braid
from braid import cli

pytestmark = pytest.mark.frameworks
transformers = pytest.importorskip("transformers")


def test_an_exported_model_with_tied_weights_is_read_by_from_pretrained(tmp_path):
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=8, bos_token_id=1, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config)
    braid.init()
    try:
        braid.save(tmp_path / "checkpoints", model=model, step=0)
    finally:
        braid.shutdown()
    config.save_pretrained(tmp_path)
    out = tmp_path / "model.safetensors"
    assert cli.main(["checkpoint", "export", str(tmp_path / "checkpoints"), str(out)]) == 0
    plain = transformers.GPT2LMHeadModel(config)
    plain.load_state_dict(load_file(out))
    pretrained = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    for other in (plain, pretrained):
        assert other.lm_head.weight is other.transformer.wte.weight
        pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
