"""`python -m braid.compat.horovod.run -np 4 python train.py` is horovodrun.

`horovod.run` must stay the function of this name, whoever imports what: imported, this module *is*
that function.
"""

from __future__ import annotations

import sys

from braid.compat.horovod.launcher.horovodrun import main
from braid.compat.horovod.launcher.run_function import run

if __name__ == "__main__":
    sys.exit(main())
sys.modules[__name__] = run  # type: ignore[assignment] # what the import then binds
