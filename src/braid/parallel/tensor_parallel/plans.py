"""Plans: kinds of sharding for a model's layers, by the names of modules.

    column      outputs are sharded; a rank computes its part
    column:3    the same for three packed matrices
    row         inputs are sharded; the output is summed over ranks
    vocab       rows of an embedding are sharded
    head        outputs are sharded and gathered, such as logits
    slice:1     dim 1 of the weight is sharded, such as a bias per head; no messages
    whole       not sharded

The user's plan comes before the built-in plan of the model's family. Module names are searched with
regular expressions; the first match decides.

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
    """Plan for sharding a family of models, such as Llama, and sizes that sharding changes.

    Attributes:
        plan: Regular expression of a module's name -> kind.
        counts: Regular expression of a module's name -> attributes with numbers of heads or
            widths, which are divided as well.
        heads: Attributes of the configuration with numbers that must be divisible.
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


STYLES = {  # styles of transformers' plans -> kinds
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "head",
    "colwise_rep": "head",
    "embedding_rowwise": "vocab",
}


def family_of(model: nn.Module) -> Family | None:
    """Return the family of a model of transformers or of braid; None if it is unknown.

    Without a built-in plan, the plan in the model's configuration is used, if braid supports all of
    its styles.
    """
    config = getattr(model, "config", None)
    kind = str(getattr(config, "model_type", ""))
    if kind in FAMILIES:
        return FAMILIES[kind]
    config_plan = getattr(config, "base_model_tp_plan", None)
    if config_plan and set(config_plan.values()) <= STYLES.keys():
        plan = {
            "[0-9]+".join(map(re.escape, name.split("*"))) + "$": STYLES[style]
            for name, style in config_plan.items()
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
            problems.append(
                f"{name} {count} cannot be divided over {size} ranks; valid numbers of ranks: "
                f"{valid}"
            )
    raise_all(problems)
