"""`KVWorker`, `KVServer` and `SimpleApp` with PS-Lite's names.

Keys and values are tensors, arrays or lists; pulled values are written into tensors or arrays.
`lens` has the number of values of each key. `cmd` is a number that the server's handler receives.
`cb` is called without arguments when a request is answered. Requests with a larger `priority` are
sent first.

Source: PS-Lite, `include/ps/kv_app.h` and `include/ps/simple_app.h`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from braid.compat.pslite.process import PROCESS
from braid.ps import kv
from braid.ps.kv.pairs import Keys, Lens
from braid.runtime.message import NUM_PRIORITIES

__all__ = ["KVServer", "KVWorker", "SimpleApp"]

Values: TypeAlias = Any  # tensor, array or list of numbers
Callback: TypeAlias = "Callable[[], object] | None"
MIDDLE = NUM_PRIORITIES // 2  # priority 0 of PS-Lite, where priorities may be negative


class _Notes:
    """Requests with a number and a text, with PS-Lite's names."""

    def Request(self: Any, req_head: int, req_body: str, recv_id: int) -> int:
        """Send a note to a node or a group; return the timestamp to wait for."""
        return int(self.request(req_head, req_body, recv_id, priority=MIDDLE))

    def Wait(self: Any, timestamp: int, timeout_s: float | None = None) -> None:
        """Wait for a request; unlike in PS-Lite, with a deadline (300 s when None)."""
        self.wait(timestamp, timeout_s)


class SimpleApp(_Notes, kv.SimpleApp):
    """App that sends and answers notes (a number and a text).

    Args:
        app_id: Number of the app, the same on all nodes.
        customer_id: Number among the apps of a worker's process with this `app_id`.
    """

    def __init__(self, app_id: int, customer_id: int = 0) -> None:
        super().__init__(PROCESS.node, app_id, customer_id)

    def Response(self, recv_req: kv.SimpleData, res_body: str = "") -> None:
        """Answer a received note with a text."""
        self.response(recv_req, res_body)


class KVWorker(_Notes, kv.KVWorker):
    """Pushes and pulls values by key on a worker.

    Args:
        app_id: Number of the app; servers have a `KVServer` with this number.
        customer_id: Number among the apps of this process with this `app_id`.
    """

    def __init__(self, app_id: int, customer_id: int = 0) -> None:
        super().__init__(PROCESS.node, app_id, customer_id)

    def Push(
        self,
        keys: Keys,
        vals: Values,
        lens: Lens = None,
        cmd: int = 0,
        cb: Callback = None,
        priority: int = 0,
    ) -> int:
        """Push values; keys and values are copied. See `push` of `braid.ps.kv.KVWorker`."""
        options = _options(cmd, cb, priority)
        return self.push(keys, torch.as_tensor(vals), lens, **options)

    def Pull(
        self,
        keys: Keys,
        vals: Values,
        lens: Values = None,
        cmd: int = 0,
        cb: Callback = None,
        priority: int = 0,
    ) -> int:
        """Pull values into a tensor or array; an empty tensor is resized. See `Push`."""
        return self.pull(keys, _out(vals), _out(lens), **_options(cmd, cb, priority))

    def PushPull(
        self,
        keys: Keys,
        vals: Values,
        outs: Values,
        lens: Values = None,
        cmd: int = 0,
        cb: Callback = None,
        priority: int = 0,
    ) -> int:
        """Push `vals` and pull into `outs` in one request; see `Push`."""
        options = _options(cmd, cb, priority)
        return self.push_pull(keys, torch.as_tensor(vals), _out(outs), _out(lens), **options)

    def ZPush(
        self,
        keys: Keys,
        vals: Values,
        lens: Lens = None,
        cmd: int = 0,
        cb: Callback = None,
        priority: int = 0,
    ) -> int:
        """Push values without a copy; keys and values must not change before `Wait` returns."""
        options = _options(cmd, cb, priority)
        return self.push(keys, torch.as_tensor(vals), lens, copy=False, **options)

    def ZPull(
        self,
        keys: Keys,
        vals: Values,
        lens: Values = None,
        cmd: int = 0,
        cb: Callback = None,
        priority: int = 0,
    ) -> int:
        """Pull values directly into the memory of `vals`; do not read it before `Wait` returns."""
        options = _options(cmd, cb, priority)
        return self.pull(keys, _out(vals), _out(lens), copy=False, **options)

    def ZPushPull(
        self,
        keys: Keys,
        vals: Values,
        outs: Values,
        lens: Values = None,
        cmd: int = 0,
        cb: Callback = None,
        priority: int = 0,
    ) -> int:
        """Push `vals` and pull into `outs`, both without copies; see `ZPush` and `ZPull`."""
        options = _options(cmd, cb, priority)
        vals = torch.as_tensor(vals)
        return self.push_pull(keys, vals, _out(outs), _out(lens), copy=False, **options)


class KVServer(_Notes, kv.KVServer):
    """Answers pushes and pulls with a handle, a function that the program sets.

    Args:
        app_id: Number of the app.
    """

    def __init__(self, app_id: int) -> None:
        super().__init__(PROCESS.node, app_id)

    def Response(self, req: kv.KVMeta | kv.SimpleData, res: kv.KVPairs | str | None = None) -> None:
        """Answer a push, a pull or a note."""
        if isinstance(res, kv.KVPairs):  # fields may have been set to lists
            res = kv.KVPairs(res.keys, res.vals, res.lens)
        self.response(req, res)


def _options(cmd: int, cb: Callback, priority: int) -> dict[str, Any]:
    """Return the keyword arguments of a request; priorities are limited to -8 to 7."""
    limited = min(max(MIDDLE + priority, 0), NUM_PRIORITIES - 1)
    return {"cmd": cmd, "callback": cb, "priority": limited}


def _out(values: Values) -> Any:
    """Return a tensor in the memory of an array, or the tensor itself."""
    return torch.from_numpy(values) if isinstance(values, np.ndarray) else values
