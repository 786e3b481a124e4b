"""torch.distributed over braid: `init_process_group("braid")`.

Importing this package registers the backend; with braid installed, `import torch` is enough.
"""

from braid.comm.torch_backend.process_group import BraidProcessGroup
from braid.comm.torch_backend.registration import create, register, share

__all__ = ["BraidProcessGroup", "create", "register", "share"]

register()
