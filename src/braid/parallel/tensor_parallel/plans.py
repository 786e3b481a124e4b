"""Plans: which layers of a model are divided, and how, by the names of modules.

    column      outputs are divided; a rank works on its part
    column:3    the same for three packed matrices
    row         inputs are divided; the whole output is there afterwards
    vocab       rows of an embedding are divided
    head        outputs are divided and gathered, such as logits
    slice:1     dim 1 of the weight is divided, such as a bias for each head; nothing is sent
    whole       nothing is divided

A plan of one's own comes first; then the built-in one of the model's family. Names are searched
with regular expressions; the first that fits decides.

Source: the patterns of published models; M. Shoeybi et al., Megatron-LM, 2019, for attention and
perceptron.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from braid.errors import raise_all

__all__ = ["KINDS", "Family", "family_of"]

KINDS = ("column", "row", "vocab", "head", "slice", "whole")


class Family(NamedTuple):
    """Knowledge of a family of models.

    Attributes:
        plan: Regular expression of a module's name -> kind.
        counts: Names of numbers in modules that count heads or widths; they are divided, too, in
            modules whose names fit the regular expression.
        heads: Names of numbers in the configuration that must be divisible.
    """

    plan: Mapping[str, str]
    counts: Mapping[str, tuple[str, ...]] = {}
    heads: tuple[str, ...] = ()


LLAMA = Family(
    {
        r"\b(q|k|v|gate|up)_proj$": "column",
        r"\b(o|down)_proj$": "row",
        r"\bembed_tokens$": "vocab",
        r"\blm_head$": "head",
    },
    heads=("num_attention_heads", "num_key_value_heads"),
)
FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "gpt2": Family(
        {
            r"\battn\.c_attn$": "column:3",
            r"\bmlp\.c_fc$": "column",
            r"\bc_proj$": "row",
            r"\bwte$": "vocab",
            r"\blm_head$": "head",
        },
        counts={r"\battn$": ("num_heads", "split_size")},
        heads=("n_head",),
    ),
    "bert": Family(
        {
            r"\battention\.self\.(query|key|value)$": "column",
            r"\bintermediate\.dense$": "column",
            r"\boutput\.dense$": "row",
            r"\bword_embeddings$": "vocab",
            r"\bpredictions\.decoder$": "head",
        },
        counts={r"\battention\.self$": ("num_attention_heads", "all_head_size")},
        heads=("num_attention_heads",),
    ),
    "vit": Family(
        {
            r"\battention\.(attention\.(query|key|value)|[qkv]_proj)$": "column",
            r"\b(intermediate\.dense|mlp\.fc1)$": "column",
            r"\b(output\.dense|attention\.o_proj|mlp\.fc2)$": "row",
        },
        counts={r"\battention(\.attention)?$": ("num_attention_heads", "all_head_size")},
        heads=("num_attention_heads",),
    ),
    "t5": Family(
        {
            r"Attention\.[qkv]$": "column",
            r"Attention\.o$": "row",
            r"\brelative_attention_bias$": "slice:1",
            r"\bwi(_\d)?$": "column",
            r"\bwo$": "row",
            r"\b(shared|embed_tokens)$": "vocab",
            r"\blm_head$": "head",
        },
        counts={r"Attention$": ("n_heads", "inner_dim")},
        heads=("num_heads",),
    ),
}
BRAID_GPT = Family(
    {r"\b(up)$": "column", r"\battend$": "column:3", r"\b(project|down)$": "row"},
)


STYLES = {  # of transformers' own plans
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "head",
    "colwise_rep": "head",
    "embedding_rowwise": "vocab",
}


def family_of(model: nn.Module) -> Family | None:
    """Return the family of a model of transformers or of braid; None if none is known.

    Where there is no built-in plan, that of the model's configuration holds, if it has styles that
    are known here only.
    """
    config = getattr(model, "config", None)
    kind = str(getattr(config, "model_type", ""))
    if kind in FAMILIES:
        return FAMILIES[kind]
    own = getattr(config, "base_model_tp_plan", None)
    if own and set(own.values()) <= STYLES.keys():
        plan = {
            "[0-9]+".join(map(re.escape, name.split("*"))) + "$": STYLES[style]
            for name, style in own.items()
        }
        return Family(plan, heads=("num_attention_heads", "num_key_value_heads"))
    return BRAID_GPT if type(model).__module__ == "braid.train.gpt" else None


def check_heads(model: nn.Module, family: Family, size: int) -> None:
    """Raise ConfigError unless all heads can be divided over `size` ranks."""
    config = getattr(model, "config", None)
    problems = []
    for name in family.heads:
        count = getattr(config, name, None)
        if isinstance(count, int) and count % size:
            valid = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            problems.append(f"{name} {count} cannot be divided over {size} ranks; valid: {valid}")
    raise_all(problems)
