"""`python -m braid.compat.horovod.run -np 4 python train.py` is horovodrun.

`horovod.run` must remain the function of this name in any order of imports. So importing this
module returns that function.
"""

from __future__ import annotations

import sys

from braid.compat.horovod.launcher.horovodrun import main
from braid.compat.horovod.launcher.run_function import run

if __name__ == "__main__":
    sys.exit(main())
sys.modules[__name__] = run  # type: ignore[assignment] # the import statement then binds it
