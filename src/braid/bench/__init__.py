"""bench: experiments that measure braid and write the figures of its documents."""

from __future__ import annotations
