"""All-to-all attention: ranks exchange positions for heads, and attend to whole sequences.

                        rank 0                rank 1
    before              positions 0 to s/2    positions s/2 to s      all heads
    after all_to_all    heads 0 to H/2        heads H/2 to H          all positions
    after attention     exchanged back

Each rank runs torch's attention on whole sequences with some of the heads. Each rank sends one
message to each other rank instead of passing data around a ring. With n ranks, the bytes per rank
decrease with n, while a ring's stay constant. The number of ranks is limited by the number of
heads, and a rank needs memory for whole sequences of its heads.

Bytes that a rank sends in forward, and again in backward, for n ranks: (n-1)/n (2 q + kv), with q
the bytes of a rank's queries, and kv the bytes of its keys and values.

Source: S. A. Jacobs et al., DeepSpeed Ulysses, 2023.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from braid.comm import Group
from braid.comm.autograd import all_to_all
from braid.errors import ConfigError, MismatchError
from braid.parallel.context_parallel.arguments import as_autocast, check_attention, shapes_differ
from braid.parallel.context_parallel.sequence import chunks_of
from braid.programs.cost import Cost

__all__ = ["all_to_all_attention", "all_to_all_costs"]


def all_to_all_attention(
    group: Group,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    balanced: bool = True,
) -> torch.Tensor:
    """Return the attention of this rank's queries to the keys and values of all ranks.

    Args:
        group: Ranks that share the sequences.
        q: Queries of this rank's positions.
        k: Keys of this rank's positions; the number of query heads is a multiple of key heads.
        v: Values of this rank's positions, with the same number of heads as keys.
        causal: Whether a position attends to no later positions.
        scale: Factor of the products; None for one over the square root of the width.
        balanced: Whether a rank's positions are an early and a late chunk (see `split_sequence`);
            only used with `causal`.

    Shape:
        q: (B, H, s, D); k and v: (B, K, s, D) with s the positions of each rank. Result: as q.

    Raises:
        ConfigError: Shapes are invalid, or heads cannot be divided over the ranks; the message has
            the valid numbers of ranks.
        MismatchError: Numbers of positions or heads, or dtypes, differ between ranks.

    Cost: two all_to_alls forward and two backward: (n-1)/n of the bytes of q, k, v and the output
        in each direction.
    """
    q, k, v = as_autocast(q, k, v)
    check_attention(group, q, k, v, halves=causal and balanced)
    _check_heads(q.shape[1], k.shape[1], group.size)
    try:
        tensors = _whole_sequences(group, (q, k, v))
    except MismatchError as exc:
        raise shapes_differ(k, v, exc) from exc
    chunks = [chunk for rank in range(group.size) for chunk in chunks_of(group.size, rank)]
    if causal and balanced:  # from the order of ranks to the order of positions
        positions = sorted(range(len(chunks)), key=chunks.__getitem__)
        tensors = [_permuted(x, positions) for x in tensors]
    queries, keys, values = tensors
    out = functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    if causal and balanced:
        out = _permuted(out, chunks)
    rows = torch.stack(out.chunk(group.size, 2))  # n B H/n s D
    return torch.cat(all_to_all(group, rows).unbind(0), 1)


def _whole_sequences(group: Group, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return this rank's heads with the positions of all ranks, in the order of ranks."""
    size = group.size
    heads = [torch.stack(x.chunk(size, 1)) for x in tensors]  # n B H/n s D
    rows = torch.cat([x.reshape(size, -1) for x in heads], 1)
    parts = all_to_all(group, rows).split_with_sizes([x[0].numel() for x in heads], 1)
    return [
        part.view(x.shape).permute(1, 2, 0, 3, 4).flatten(2, 3)
        for part, x in zip(parts, heads, strict=True)
    ]


def _permuted(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    pieces = x.chunk(len(order), 2)
    return torch.cat([pieces[i] for i in order], 2)


def _check_heads(heads: int, kv_heads: int, size: int) -> None:
    if kv_heads % size == 0 and heads % size == 0:
        return
    valid = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and heads % n == 0]
    msg = (
        f"{heads} query heads and {kv_heads} key-value heads cannot be divided over {size} "
        f"ranks; valid numbers of ranks: {', '.join(map(str, valid))}. Choose one, or use "
        "ring_attention, which has no such limit"
    )
    raise ConfigError(msg)


def all_to_all_costs(size: int, q_bytes: int, kv_bytes: int) -> tuple[Cost, Cost]:
    """Return the costs of `all_to_all_attention`, forward and backward.

    Args:
        size: Number of ranks.
        q_bytes: Bytes of a rank's queries.
        kv_bytes: Bytes of a rank's keys and values.
    """
    one_way = Cost(2 * (size - 1), (size - 1) / size * (2 * q_bytes + kv_bytes))
    return one_way, one_way
