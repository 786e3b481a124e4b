"""Names of devices: `/job:worker/task:1/device:cpu:0`, complete or in part.

A model names a device around its calls, and a dict names devices of modules:

    with braid.device("/job:worker/task:1"):
        with braid.device("/device:cpu:0"):
            x = self.head(x)  # on /job:worker/task:1/device:cpu:0

    devices = {"encoder.*": "/job:worker/task:0", "head": "/task:1"}

An inner scope replaces the fields that it names. A device of a cluster matches a name if it has all
fields of the name.

Source: TensorFlow, `tf.DeviceSpec` and `tf.device`; types of devices are torch's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields

from braid.errors import ConfigError
from braid.parallel.graph import device_scope

__all__ = ["DeviceSpec", "device", "merged"]

_FIELD = re.compile(
    r"/(?:job:(?P<job>[A-Za-z_]\w*)|(?P<number>replica|task):(?P<value>\d+)"
    r"|(?:device:)?(?P<type>cpu|gpu|cuda)(?::(?P<index>\d+|\*))?)(?=/|$)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Fields of a device's name, such as `/job:worker/task:1/cpu:0`; None if left out.

    Attributes:
        job: Job of the task, such as `worker`.
        replica: Number of the replica.
        task: Number of the task in its job.
        device_type: `cpu` or `cuda`.
        device_index: Number of the device in its task.
    """

    job: str | None = None
    replica: int | None = None
    task: int | None = None
    device_type: str | None = None
    device_index: int | None = None

    @classmethod
    def parse(cls, text: str) -> DeviceSpec:
        """Return the device that a text names.

        >>> DeviceSpec.parse("/job:worker/task:1/device:CPU:0").task
        1

        Raises:
            ConfigError: The text is not a name of a device, or names a field twice.
        """
        known: dict[str, str | int | None] = {}
        rest = text
        while rest:
            match = _FIELD.match(rest)
            part = {} if match is None else _parts(match)
            if not part or part.keys() & known.keys():
                what = "is not a name of a device" if not part else f"names {min(part)} twice"
                msg = (
                    f"{text!r} {what} at {rest!r}: expected fields such as "
                    "'/job:worker/task:1/device:cpu:0', each once"
                )
                raise ConfigError(msg)
            known |= part
            assert match is not None
            rest = rest[match.end() :]
        return cls(**known)  # type: ignore[arg-type]

    def with_inner(self, inner: DeviceSpec) -> DeviceSpec:
        """Return this name, with the fields that the name of an inner scope sets replaced."""
        values = {
            field.name: getattr(self if getattr(inner, field.name) is None else inner, field.name)
            for field in fields(self)
        }
        return DeviceSpec(**values)

    def matches(self, device: DeviceSpec) -> bool:
        """Return whether a device has all fields of this name."""
        return all(
            getattr(self, field.name) in (None, getattr(device, field.name))
            for field in fields(self)
        )

    def __str__(self) -> str:
        numbered = (("job", self.job), ("replica", self.replica), ("task", self.task))
        parts = [f"/{name}:{value}" for name, value in numbered if value is not None]
        if self.device_type is not None or self.device_index is not None:
            index = "*" if self.device_index is None else self.device_index
            parts.append(f"/device:{self.device_type or 'cpu'}:{index}")
        return "".join(parts)


def _parts(match: re.Match[str]) -> dict[str, str | int | None]:
    if match["job"]:
        return {"job": match["job"]}
    if match["number"]:
        return {match["number"].lower(): int(match["value"])}
    kind = {"gpu": "cuda"}.get(match["type"].lower(), match["type"].lower())
    index = match["index"]
    return {"device_type": kind, "device_index": int(index) if index and index != "*" else None}


def device(name: str | DeviceSpec | None) -> AbstractContextManager[None]:
    """In this context, name the device on which captured calls should run.

    Args:
        name: Name of a device, complete or in part; None to ignore outer scopes.

    Raises:
        ConfigError: The text is not a name of a device, or the code belongs to a module that is
            captured as one call.
    """
    return device_scope(None if name is None else str(_spec_of(name)))


def merged(scopes: Sequence[str | DeviceSpec]) -> DeviceSpec:
    """Return the device that nested scopes name, from the outermost scope to the innermost."""
    spec = DeviceSpec()
    for scope in scopes:
        spec = spec.with_inner(_spec_of(scope))
    return spec


def _spec_of(name: str | DeviceSpec) -> DeviceSpec:
    return name if isinstance(name, DeviceSpec) else DeviceSpec.parse(name)
