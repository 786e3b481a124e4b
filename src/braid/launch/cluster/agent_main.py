"""Program that a `Placement` starts on a host: an agent that communicates on stdin and stdout.

python -m braid.launch.cluster.agent_main
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress

from braid.launch.cluster.agent import LOST_EXIT_CODE, serve
from braid.launch.cluster.agent_channel import first_line
from braid.runtime.message import PipeStream

__all__ = ["main"]


def main() -> int:
    """Serve on stdin and stdout; return the exit code of the run."""
    reader, writer = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # prints go to stderr, not between the frames
    os.close(null)
    os.write(writer, first_line())
    bye = serve(PipeStream(reader, writer, "the launcher"))
    if bye.exit_code == LOST_EXIT_CODE and bye.text:
        with suppress(OSError):  # the reader of stderr may be gone
            os.write(2, f"{bye.text} ({socket.gethostname()})\n".encode())
    return bye.exit_code


if __name__ == "__main__":
    sys.exit(main())
