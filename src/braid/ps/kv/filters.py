"""Filters make requests smaller: fewer keys, fewer bits, fewer values, fewer bytes.

    kv.push(keys, grads, filters=[TopK(0.01), FixedPoint(8), Compression(), cache])
    kv.pull(keys, out, filters=[FixedPoint(16)])           encodes the answers of servers

Filters apply in their order. `KeyCache` and `TopK` have state: use one object for all requests of
one worker. Each filter counts the bytes that it saves.

    filter         pushes    pulls    loses
    KeyCache       keys      keys     nothing: a server without the keys requests them
    Compression    all       vals     nothing
    FixedPoint     vals      vals     up to one step of max|v| / 127 (8 bits); unbiased
    TopK           vals      -        nothing in the long run: the rest is added to later pushes

Source: M. Li et al., Parameter Server, OSDI 2014, section 3.5 (user-defined filters: key caching,
compression, fixing floats); F. Seide et al., 1-bit SGD, Interspeech 2014 (error feedback).
"""

from __future__ import annotations

import hashlib
from abc import ABC
from collections import OrderedDict, defaultdict
from typing import TypeAlias

import torch

from braid.errors import ConfigError
from braid.ps.kv.messages import Coding, Compressed, FixedPointed, Head, Sparsified
from braid.ps.kv.parcel import Parcel, compress, refuse_nonfinite
from braid.runtime.tensor_buffers import bytes_of
from braid.types import dtype_name

__all__ = ["Compression", "Filter", "FixedPoint", "KeyCache", "TopK", "digest_of", "filter_of"]

DIGEST_BYTES = 16
_Place: TypeAlias = tuple[int, bytes, int]  # server, digest of the keys, number of values


def digest_of(keys: torch.Tensor) -> bytes:
    """Return a 16-byte hash of keys."""
    return hashlib.blake2b(bytes_of(keys), digest_size=DIGEST_BYTES).digest()


class Filter(ABC):  # noqa: B024 - each method has a default
    """Encodes the tensors of a request to one server.

    Attributes:
        saved_bytes: Number of bytes that were not sent, including those of decoded answers.
    """

    head: type[Head] | None = None

    def __init__(self) -> None:
        self.saved_bytes = 0

    def encode(self, parcel: Parcel, server: int) -> None:
        """Encode a parcel in place, and count the saved bytes."""
        before = parcel.nbytes
        self._encode(parcel, server)
        self.saved_bytes += before - parcel.nbytes

    def _encode(self, parcel: Parcel, server: int) -> None:
        del parcel, server

    def keep(self) -> None:  # noqa: B027 - most filters have no state
        """Commit the state changes of `encode`: the request was sent."""

    def undo(self) -> None:  # noqa: B027
        """Roll back the state changes of `encode` since the last `keep`: nothing was sent."""

    def coding(self) -> Coding | None:
        """Return the encoding that servers use for answers; None if only requests are encoded."""
        return None


class Compression(Filter):
    """Compresses the bytes of each tensor if that makes it smaller.

    Args:
        level: 1 (fast) to 9.

    Source: RFC 1950, as in zlib.
    """

    head = Compressed

    def __init__(self, level: int = 1) -> None:
        super().__init__()
        if not 1 <= level <= 9:
            msg = f"a compression level must be 1 to 9, got {level}"
            raise ConfigError(msg)
        self._level = level

    def _encode(self, parcel: Parcel, server: int) -> None:
        del server
        for name, tensor in parcel.tensors.items():
            data, head = compress(name, tensor, self._level)
            if data.nbytes < tensor.nbytes:
                parcel.tensors[name] = data
                parcel.heads.append(head)

    def coding(self) -> Coding | None:
        """Return the encoding for answers; see `Filter.coding`."""
        return Coding(level=self._level)


class FixedPoint(Filter):
    """Rounds floating-point values stochastically to multiples of a scale, without bias.

    Args:
        bits: 8 or 16.
        seed: Seed of the rounding.

    Values that are not floating-point are not changed.

    Source: M. Li et al., OSDI 2014, section 5.1 (fixing-float filter); S. Gupta et al., ICML 2015
    (stochastic rounding).
    """

    head = FixedPointed

    def __init__(self, bits: int = 8, seed: int = 0) -> None:
        super().__init__()
        if bits not in {8, 16}:
            msg = f"FixedPoint needs 8 or 16 bits, got {bits}"
            raise ConfigError(msg)
        self._bits, self._seed = bits, seed
        self._dtype = torch.int8 if bits == 8 else torch.int16
        self._generator = torch.Generator().manual_seed(seed)

    def _encode(self, parcel: Parcel, server: int) -> None:
        del server
        vals = parcel.tensors.get("vals")
        if vals is None or not vals.is_floating_point() or not len(vals):
            return
        refuse_nonfinite(vals)
        steps = (1 << (self._bits - 1)) - 1
        scale = float(vals.abs().max()) / steps or 1.0
        rounds = torch.rand(vals.shape, generator=self._generator)
        fixed = vals.double().div_(scale).add_(rounds).floor_().clamp_(-steps, steps)
        parcel.tensors["vals"] = fixed.to(self._dtype)
        parcel.heads.append(FixedPointed(scale, dtype_name(vals.dtype)))

    def coding(self) -> Coding | None:
        """Return the encoding for answers; see `Filter.coding`."""
        return Coding(bits=self._bits, seed=self._seed)


class TopK(Filter):
    """Pushes only the largest values, and adds the others to the next push of the same keys.

    Args:
        fraction: Fraction of the values to push, above 0 and up to 1.

    Memory: the size of the values, for each set of keys that is pushed.

    Source: A. Aji and K. Heafield, EMNLP 2017; error feedback: F. Seide et al., Interspeech 2014.
    """

    head = Sparsified

    def __init__(self, fraction: float) -> None:
        super().__init__()
        if not 0 < fraction <= 1:
            msg = f"TopK: fraction must be above 0 and at most 1, got {fraction}"
            raise ConfigError(msg)
        self._fraction = fraction
        self._residuals: dict[_Place, torch.Tensor] = {}
        self._before: dict[_Place, torch.Tensor | None] = {}  # residuals at the last `keep`

    def _encode(self, parcel: Parcel, server: int) -> None:
        vals = parcel.tensors.get("vals")
        if vals is None or not len(vals):
            return
        keys = parcel.tensors["keys"] if parcel.keys is None else parcel.keys
        place = server, digest_of(keys), len(vals)
        residual = self._residuals.get(place)
        wanted = vals.clone() if residual is None else vals + residual
        count = max(1, round(self._fraction * len(vals)))
        places = wanted.abs().topk(count).indices.sort().values
        parcel.tensors["vals"] = wanted[places]
        parcel.tensors["places"] = places.int()
        parcel.heads.append(Sparsified(len(vals)))
        wanted[places] = 0
        self._before.setdefault(place, residual)
        self._residuals[place] = wanted

    def keep(self) -> None:
        """Commit the state changes of `encode`; see `Filter.keep`."""
        self._before.clear()

    def undo(self) -> None:
        """Roll back the state changes of `encode`; see `Filter.undo`."""
        for place, residual in self._before.items():
            if residual is None:
                del self._residuals[place]
            else:
                self._residuals[place] = residual
        self._before.clear()


class KeyCache(Filter):
    """Replaces keys by their digest if the server has them from an earlier request.

    Args:
        capacity: Number of key sets that this worker assumes each server to have. A server that has
            dropped one requests the keys.

    Source: M. Li et al., OSDI 2014, section 3.5 (key caching).
    """

    def __init__(self, capacity: int = 64) -> None:
        super().__init__()
        self._capacity = capacity
        self._known: defaultdict[int, OrderedDict[bytes, None]] = defaultdict(OrderedDict)

    def _encode(self, parcel: Parcel, server: int) -> None:
        keys = parcel.tensors["keys"]
        if keys.dtype != torch.uint64:
            msg = "KeyCache cannot read encoded keys: put it before Compression in filters"
            raise ConfigError(msg)
        parcel.digest = digest_of(keys)
        known = self._known[server]
        if parcel.digest in known:
            known.move_to_end(parcel.digest)
            parcel.keys = parcel.tensors.pop("keys")
            self.saved_bytes -= DIGEST_BYTES
            return
        known[parcel.digest] = None
        if len(known) > self._capacity:
            known.popitem(last=False)

    def was_missed(self, parcel: Parcel) -> None:
        """Subtract the bytes that seemed saved for keys which the server turned out not to have."""
        if parcel.keys is not None:
            self.saved_bytes -= parcel.keys.nbytes


def filter_of(coding: Coding, timestamp: int) -> Filter:
    """Return the filter that encodes the answer to a request; the timestamp seeds its rounding.

    Raises:
        ConfigError: The parameters of the encoding are out of range.
    """
    if coding.bits:
        return FixedPoint(coding.bits, (coding.seed + timestamp) % (1 << 63))
    return Compression(coding.level)
