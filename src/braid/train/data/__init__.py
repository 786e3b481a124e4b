"""Text as bytes, from the user's files or from Python itself; see README.md."""

from __future__ import annotations

from braid.train.data.corpus import Corpus, from_files, standard_library
from braid.train.data.windows import Windows

__all__ = ["Corpus", "Windows", "from_files", "standard_library"]
