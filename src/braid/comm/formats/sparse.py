"""Top-k sparsification: only the largest numbers, with their indices; 1 % of them in 2 % of bytes.

Problem: finding the exact k largest of n numbers takes longer than a fast network takes to send all
of them.

Idea: find a *threshold* in a sample, and select all numbers of at least that magnitude in one pass.
If these are more than k, keep exactly the largest k of them. At most k = ceil(ratio * n) numbers
are sent, so the size on the wire has a bound, and no omitted number is larger in magnitude than a
sent one.

    wire    | count: int32 | indices: int32 x count, ascending | values: float32 x count |

The sample has the same positions every time (steps of about n / golden ratio, which spread evenly
and do not favour a row or column of a matrix), so every run sends the same numbers. Sent numbers
are exact, omitted numbers arrive as zero: add them to the next call's numbers with `ErrorFeedback`,
or training may never use them. Zeros are not sent. NaN and infinity count as larger than any number
and are sent first.

Source: Lin et al., "Deep Gradient Compression" (2018), section 3 (threshold from a sample, then
exact among the selected); Aji, Heafield, "Sparse Communication for Distributed Gradient Descent"
(2017).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from braid.comm.formats.wire_format import CHUNK, check_length, chunks, numbers, room, same_device
from braid.errors import CommError, ConfigError

__all__ = ["TopKFormat"]

LEAST_SAMPLE, MOST_SAMPLE = 1 << 12, 1 << 16  # numbers
REACHING = 64  # expected numbers of the sample above the threshold: the count is then off by 13 %
GOLDEN = (1 + 5**0.5) / 2
ENTRY_BYTES = 8  # an index and a value
COUNT_BYTES = 4
MAX_NUMEL = (1 << 31) - 1  # range of an index
SMALLEST = 2.0**-149  # a threshold above zero excludes zeros


@dataclass(frozen=True, slots=True)
class TopKFormat:
    """Format that sends only the numbers of largest magnitude, at most `ratio` of all.

    A sent number has no error. The error of an omitted number is the number itself, which is not
    larger in magnitude than any sent one.

    Attributes:
        ratio: Share of the numbers that may be sent, above 0 and at most 1; rounded up to whole
            numbers.

    Cost:
        At most `4 + 8 * ceil(ratio * n)` bytes; two passes over the numbers to encode, one to
        decode, none to add.

    Raises:
        ConfigError: `ratio` is out of range.
    """

    ratio: float

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            msg = (
                f"the ratio of topk must be above 0 and at most 1, got {self.ratio}: write "
                "topk:0.01 to send 1 %"
            )
            raise ConfigError(msg)

    @property
    def name(self) -> str:
        """Name of the format, for `by_name`."""
        return f"topk:{self.ratio}"

    @property
    def lossy(self) -> bool:
        """True; even a ratio of 1 loses the sign of zero."""
        return True

    def max_entries(self, numel: int) -> int:
        """Return the largest number of entries that are sent for `numel` numbers."""
        return min(numel, math.ceil(self.ratio * numel))

    def nbytes(self, numel: int) -> int:
        """Return an upper bound on the encoded bytes; see `WireFormat.nbytes`."""
        return COUNT_BYTES + ENTRY_BYTES * self.max_entries(numel)

    def encode(self, x: torch.Tensor, into: torch.Tensor) -> int:
        """Write `x` into the beginning of `into`; see `WireFormat.encode`."""
        x = numbers(x, "x")
        if x.numel() > MAX_NUMEL:
            msg = (
                f"topk takes at most {MAX_NUMEL} numbers per call, not {x.numel()}: encode the "
                "tensor in parts"
            )
            raise ConfigError(msg)
        into = room(into, "into", self.nbytes(x.numel()))
        same_device(x, into)
        chosen = _largest(x, self.max_entries(x.numel()))
        count = chosen.numel()
        head, indices, values = _parts(into, count)
        head.fill_(count)
        indices.copy_(chosen)
        torch.index_select(x, 0, chosen, out=values)
        return COUNT_BYTES + ENTRY_BYTES * count

    def decode(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        """Write the numbers in `buffer` into `out`; see `WireFormat.decode`."""
        out = numbers(out, "out")
        indices, values = self._read(buffer, out)
        out.zero_().index_copy_(0, indices, values)

    def add(self, buffer: torch.Tensor, out: torch.Tensor) -> None:
        """Add the numbers in `buffer` to `out`; see `WireFormat.add`."""
        out = numbers(out, "out")
        indices, values = self._read(buffer, out)
        out.index_add_(0, indices, values)

    def _read(self, buffer: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        buffer = room(buffer, "buffer")
        same_device(out, buffer)
        numel, nbytes = out.numel(), buffer.numel()
        if nbytes < COUNT_BYTES:
            check_length(self.name, nbytes, COUNT_BYTES, numel)
        count = int(buffer[:COUNT_BYTES].view(torch.int32))
        cap = self.max_entries(numel)
        if not 0 <= count <= cap:
            msg = (
                f"a message of {self.name} has count {count} for {numel} numbers, but at most "
                f"{cap} are possible: use the same format and shape on both ranks"
            )
            raise CommError(msg)
        check_length(self.name, nbytes, COUNT_BYTES + ENTRY_BYTES * count, numel)
        _, narrow, values = _parts(buffer, count)
        indices = narrow.long()
        if count and not (
            int(indices[0]) >= 0
            and int(indices[-1]) < numel
            and bool((indices[1:] > indices[:-1]).all())
        ):
            low, high = (int(end) for end in indices.aminmax())
            msg = (
                f"the {count} indices in {self.name}, from {low} to {high}, do not ascend from 0 "
                f"to {numel - 1}: use one format on all ranks, or the message is corrupt"
            )
            raise CommError(msg)
        return indices, values


def _parts(buffer: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    words = buffer[: COUNT_BYTES + ENTRY_BYTES * count].view(torch.int32)
    return words[:1], words[1 : 1 + count], words[1 + count :].view(torch.float32)


def _largest(x: torch.Tensor, cap: int) -> torch.Tensor:
    """Return the ascending indices of the largest magnitudes: about `cap`, and not more."""
    if cap == 0:
        return torch.empty(0, dtype=torch.int64, device=x.device)
    threshold = _threshold(x, cap)
    indices = [
        # negated, so that NaN is selected
        (piece.abs() < threshold).logical_not_().nonzero().view(-1) + start
        for start, piece in zip(range(0, x.numel(), CHUNK), chunks(x), strict=True)
    ]
    chosen = torch.cat(indices)
    if chosen.numel() > cap:
        among = x[chosen].abs().topk(cap, sorted=False).indices
        chosen = chosen[among].sort().values
    return chosen


def _threshold(x: torch.Tensor, cap: int) -> float:
    """Return a magnitude above zero that about `cap` of the numbers reach."""
    numel = x.numel()
    sample, size = x, round(min(MOST_SAMPLE, max(LEAST_SAMPLE, REACHING * numel / cap)))
    if numel > size:
        step = round(numel / GOLDEN)
        while math.gcd(step, numel) > 1:
            step += 1
        sample = x[torch.arange(size, device=x.device) * step % numel]
    rank = max(1, round(cap * sample.numel() / numel))
    reached = sample.abs().topk(rank).values[-1]  # NaN sorts first: NaN only if all of them are
    return max(SMALLEST, float(reached))  # max returns SMALLEST for NaN
