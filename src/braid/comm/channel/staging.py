"""Staging: slots and addresses that a rank publishes with the next step of a channel.

Problem: two slots, used alternately, are enough (see `channel`). But it takes a core 26 us to write
256 KiB that another core has just read, and 8 us if the caches of both cores no longer have them.

Idea: large data passes through more slots in turn. Together these have twice the size of the cache
that one core usually has. Slots grow as needed and are kept, with the tensors that view them:
making these takes most of the time of a small collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from braid.runtime.transport import Block, MemoryTransport

__all__ = ["CHUNK_BYTES", "LARGE_BYTES", "PRIVATE", "SLOTS_BYTES", "Staging", "pieces"]

CHUNK_BYTES = 512 << 10  # per slot: the slots of a few ranks fit into the cache, and steps are few
LARGE_BYTES = 64 << 10  # of data that passes through more than two slots
SLOTS_BYTES = 2 << 20  # of these slots together
MIN_SLOT_BYTES = 4096
MAX_PLACES = 1024  # tensors on slots, cached for the next call of the same size
PRIVATE = 1 << 63  # marks private addresses; the kernel's half of the address space has no tensors


class Staging:
    """Staging memory of this rank on one channel.

    `Channel.publish` publishes the address and data that are set here, and clears them.

    Args:
        transport: This rank's end of the transport.
        peers: Group ranks of the other members.
        shares: Whether peers may be able to read tensors in place, so that exposing them is useful.

    Attributes:
        turn: Number of steps that have published a slot.
        address: Address that the next step publishes; 0 for none.
        nbytes: Number of bytes in the slot that the next step publishes.
        parts: First and past-the-end byte for each other member; None to send all bytes to all.
    """

    __slots__ = (
        "_arena",
        "_peers",
        "_places",
        "_rank",
        "_scratch",
        "_shares",
        "_size",
        "_slots",
        "address",
        "nbytes",
        "parts",
        "turn",
    )

    def __init__(self, transport: MemoryTransport, peers: Sequence[int], *, shares: bool) -> None:
        self.turn = 0
        self.address = 0
        self.nbytes = 0
        self.parts: list[tuple[int, int]] | None = None
        self._arena = transport.arena
        self._rank = transport.rank
        self._peers = peers
        self._size = len(peers) + 1
        self._shares = shares
        self._slots: dict[int, Block] = {}
        # address and memory by slot, size and dtype
        self._places: dict[tuple[int, int, torch.dtype], tuple[int, torch.Tensor]] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    def slot(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory (slot) of the next step, to fill before the step is published."""
        nbytes = numel * dtype.itemsize
        num_slots = 2
        if nbytes >= LARGE_BYTES and self._shares:  # a power of two, so that two steps differ
            num_slots = max(2, SLOTS_BYTES >> (nbytes - 1).bit_length())
        key = self.turn & (num_slots - 1), numel, dtype
        place = self._places.get(key) or self._place(*key)
        self.nbytes = nbytes
        self.address, memory = place
        return memory

    def _place(self, number: int, numel: int, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
        """Return the address and the memory of a slot, which grows if it must."""
        nbytes = numel * dtype.itemsize
        block = self._slots.get(number)
        if block is None or block.nbytes < nbytes:
            if block is not None:
                self._arena.free(block)
                self._places.clear()
            block = self._arena.allocate(max(MIN_SLOT_BYTES, 1 << max(nbytes - 1, 0).bit_length()))
            self._slots[number] = block
        if len(self._places) > MAX_PLACES:
            self._places.clear()
        place = block.address, self._arena.view(self._rank, block.address, numel, dtype)
        self._places[number, numel, dtype] = place
        return place

    def stage(self, x: torch.Tensor) -> torch.Tensor:
        """Copy a flat tensor into the slot of the next step; return the copy."""
        return self.slot(x.numel(), x.dtype).copy_(x)

    def send_ranges(self, bounds: Sequence[int], dtype: torch.dtype) -> None:
        """Send each member only its part of the slot, if memory is not shared.

        Args:
            bounds: Member r reads elements `bounds[r]` to `bounds[r + 1]` of the current slot.
            dtype: Dtype of the elements.
        """
        if not self._shares:
            size = dtype.itemsize
            self.parts = [(bounds[r] * size, bounds[r + 1] * size) for r in self._peers]

    def send_only_to(self, member: int, numel: int, dtype: torch.dtype) -> None:
        """Send the first `numel` elements of the current slot to `member` only.

        Does nothing if memory is shared.
        """
        if not self._shares:
            self.send_ranges([0] * (member + 1) + [numel] * (self._size - member), dtype)

    def expose(self, x: torch.Tensor, *, private: bool = False) -> None:
        """Publish the address of the flat tensor `x` with the next step, instead of a slot.

        Args:
            x: Contiguous tensor; unchanged until a later step shows that every peer has read it.
            private: Whether to expose memory outside the arena as well, by its address in this
                process. Peers can only read such memory.
        """
        self.expose_address(self.locate(x, private=private))

    def locate(self, x: torch.Tensor, *, private: bool = False) -> int:
        """Return an address of `x` that peers can read, or 0; for `private` see `expose`."""
        if not self._shares:
            return 0
        address = self._arena.locate(x)
        if not address and private and x.numel():
            address = PRIVATE | x.data_ptr()
        return address

    def expose_address(self, address: int) -> None:
        """Publish `address` with the next step, without data from a slot."""
        self.address = address
        self.nbytes = 0

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return private memory for intermediate results; every call returns the same memory."""
        nbytes = numel * dtype.itemsize
        if self._scratch.numel() < nbytes:
            self._scratch = torch.empty(
                1 << (nbytes - 1).bit_length(), dtype=torch.uint8, device="cpu"
            )
        return self._scratch[:nbytes].view(dtype)

    def free(self) -> None:
        """Free the memory of all slots."""
        for block in self._slots.values():
            self._arena.free(block)
        self._slots.clear()


def pieces(x: torch.Tensor, nbytes: int) -> list[torch.Tensor]:
    """Return consecutive slices of a flat tensor of at most `nbytes` each."""
    numel = x.numel()
    step = max(1, nbytes // x.element_size())
    return [x] if numel <= step else [x[i : i + step] for i in range(0, numel, step)]
