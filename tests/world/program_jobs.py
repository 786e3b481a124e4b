"""Programs as a launcher starts them, on the processes of the pool: none of them imports torch anew.

A program finds the variables that every launcher sets, calls `braid.init()` itself and is left as at the interpreter's end.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import braid
import braid.compat.horovod.torch as hvd
from braid.comm import Group


def _run(
    group: Group, path: str, words: tuple[str, ...], environ: dict[str, str], directory: str
) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = group.objects.broadcast(probe.getsockname()[1], 0)
    found = {
        "RANK": str(group.rank),
        "WORLD_SIZE": str(group.size),
        "LOCAL_RANK": str(group.rank),
        "LOCAL_WORLD_SIZE": str(group.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "USE_LIBUV": "0",  # with it, torch's store leaves a pipe open
    }
    out, folder, modules = io.StringIO(), str(Path(path).parent), set(sys.modules)
    torch_store = partial(torch.distributed.TCPStore, use_libuv=False)
    with (
        patch.object(torch.distributed, "TCPStore", torch_store),
        patch.dict(os.environ, found | environ),
        patch.object(sys, "path", [folder, *sys.path]),
        patch.object(sys, "argv", [path, *words]),
        patch.object(sys, "excepthook", sys.excepthook),
        contextlib.redirect_stdout(out),
    ):
        before = Path.cwd()
        os.chdir(directory)
        try:
            runpy.run_path(path, run_name="__main__")
        finally:
            os.chdir(before)
            hvd.shutdown()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            braid.shutdown()
            for name in set(sys.modules) - modules:
                if (getattr(sys.modules[name], "__file__", "") or "").startswith(folder):
                    del sys.modules[name]  # another program may have a module of this name
    return out.getvalue()


def run_program(
    procs: Callable[..., list[Any]],
    size: int,
    path: Path,
    *words: str,
    directory: str | Path = ".",
    **environ: str,
) -> list[str]:
    """Run a program on `size` processes of the pool and return what each printed."""
    return procs(size, _run, str(path), words, environ, str(directory))
