"""Entry point through which torch learns of the backend named "braid"; it cannot raise.

torch imports this module while it is itself being imported (group `torch.backends`), so it must be tiny and must never
break a program that does not use braid.
"""

from __future__ import annotations


def autoload() -> None:
    """Called by torch once, at the end of `import torch`."""
