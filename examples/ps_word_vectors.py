"""Skip-gram word vectors from Python's standard library, in sparse tables of a parameter server.

    braid run --servers 3 --workers 2 examples/ps_word_vectors.py

Words with similar neighbours get similar vectors. The score, a mean over pairs of related words, is
the share of all words that are less similar to the first word than the second one is. Vectors have
the same bits with any number of servers.

Source: T. Mikolov et al., Distributed Representations of Words and Phrases, NeurIPS 2013.
"""

import hashlib
import re
from collections import Counter

import torch
from torch.nn import functional

import braid
from braid import ps
from braid.train.corpus import standard_library

STEPS, BATCH, WINDOW, NEGATIVES, DIM, WORDS = 250, 2048, 4, 5, 32, 4000
PAIRS = (
    "true false|args kwargs|min max|start stop|read write|int float|left right|key value|"
    "input output|first last|open close|list tuple|encode decode|get set|width height|"
    "lower upper|year month|host port|parent child|lock release|push pop|row column|stdin stdout"
)


def words_of_library(num_bytes: int = 4_000_000) -> tuple[list[str], torch.Tensor]:
    """Return the most frequent words, and the text as indices into that list."""
    text = standard_library().train[:num_bytes].decode(errors="ignore").lower()
    tokens = re.findall(r"[a-z]{2,}", text)
    words = [word for word, _ in Counter(tokens).most_common(WORDS)]
    places = {word: place for place, word in enumerate(words)}
    return words, torch.tensor([places[word] for word in tokens if word in places])


def batch(step: int, worker: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return words [n], and for each a near word and random words [n, 1 + NEGATIVES]."""
    generator = torch.Generator().manual_seed(1000 * step + worker)
    near = torch.randint(1, WINDOW + 1, (BATCH,), generator=generator)
    at = torch.randint(len(text) - WINDOW, (BATCH,), generator=generator)
    noise = text[torch.randint(len(text), (BATCH, NEGATIVES), generator=generator)]
    return text[at], torch.cat([text[at + near, None], noise], 1)


def score(vectors: torch.Tensor, shift: int = 0) -> float:
    """Return the mean share of words less similar than the partner `shift` pairs further on."""
    unit = functional.normalize(vectors)
    pairs = [pair.split() for pair in PAIRS.split("|")]
    shares = []
    for place, (first, _) in enumerate(pairs):
        near = unit @ unit[words.index(first)]
        partner = words.index(pairs[(place + shift) % len(pairs)][1])
        shares.append((near < near[partner]).double().mean())
    return torch.stack(shares).mean().item()


group = braid.init()
with ps.join(group) as node:
    inner, outer = (
        node.sparse(name, DIM, ps.Adagrad(lr=0.2), init=ps.Uniform(-0.1, 0.1), seed=seed)
        for seed, name in enumerate(("inner", "outer"))
    )
    if not node.is_worker:
        node.serve()
    else:
        words, text = words_of_library()
        center, context = ps.Embedding(inner), ps.Embedding(outer)
        labels = torch.tensor([1.0] + [0.0] * NEGATIVES).expand(BATCH, -1)
        for step in range(STEPS):
            first, others = batch(step, node.number)
            logits = torch.einsum("nd,nkd->nk", center(first), context(others))
            loss = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
            loss.backward()
            center.step()
            context.step()
            if step % 50 == 49 and node.number == 0:
                print(f"step {step + 1}: loss {loss.item() / BATCH:.3f}", flush=True)
        vectors = inner.pull(torch.arange(len(words)))
        digest = hashlib.sha256(vectors.numpy().tobytes()).hexdigest()[:12]
        pairs, others = score(vectors), score(vectors, shift=7)
        print(f"worker {node.number}: score {pairs:.3f} (other partners {others:.3f}), {digest}")
        assert pairs > 0.9
        assert others < 0.7
