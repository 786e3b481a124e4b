"""Words of an engine's client, and the messages that it prints for its launcher.

--num-ranks=4  --strategy=spread         own options, as NAME=VALUE or NAME VALUE
--partition=gpu                          any other option is the engine's
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Sequence

import msgspec

from braid.errors import ConfigError

__all__ = ["ClientWords", "FromClient", "run_client"]

CANNOT_START = 2


class FromClient(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Message of an engine's client to its launcher, as a line of JSON on stdout.

    Attributes:
        hosts: Names of the nodes that the job may use, with their slots; empty in other messages.
        lost: Number of a lost node; -1 in other messages.
        why: Reason why that node was lost.
    """

    hosts: tuple[tuple[str, int], ...] = ()
    lost: int = -1
    why: str = ""

    def send(self) -> None:
        """Send the message to the launcher."""
        os.write(1, msgspec.json.encode(self) + b"\n")


class ClientWords(dict[str, str]):
    """Options of an engine's client by name, without dashes.

    Attributes:
        num_ranks: Number of ranks; 0 for all that the allocation has.
        rest: Words for the engine itself.
    """

    num_ranks: int = 0
    rest: tuple[str, ...] = ()

    @classmethod
    def parse(
        cls, words: Sequence[str], options: Collection[str], *, others: bool = False
    ) -> ClientWords:
        """Parse the command-line words of an engine's client.

        Args:
            words: Words after the client's name.
            options: Names of the client's options besides `num-ranks`.
            others: Whether further words are options of the engine.

        Raises:
            ConfigError: An option is unknown, or has no value.
        """
        made, rest, index = cls(), [], 0
        while index < len(words):
            name, equals, value = words[index].partition("=")
            index += 1
            if not (name.startswith("--") and name[2:] in {"num-ranks", *options}):
                if not others:
                    known = ", ".join(f"--{option}" for option in sorted(options))
                    msg = f"this engine has no option {name}: it has {known}"
                    raise ConfigError(msg)
                rest.append(words[index - 1])
                continue
            if not equals:
                if index == len(words):
                    msg = f"{name} needs a value: add one after it"
                    raise ConfigError(msg)
                value, index = words[index], index + 1
            made[name[2:]] = value
        count = made.pop("num-ranks", "0")
        if not count.isdecimal():
            msg = f"--num-ranks must be a number, got {count!r}"
            raise ConfigError(msg)
        made.num_ranks, made.rest = int(count), tuple(rest)
        return made

    def numbers(self, name: str) -> dict[str, float]:
        """Return the option `name`, such as `CPU=2,GPU=1`, as numbers.

        Raises:
            ConfigError: The option is not of this form, or a number is negative.
        """
        numbers = {}
        for part in filter(None, self.get(name, "").split(",")):
            key, _, value = part.partition("=")
            try:
                numbers[key] = float(value)
            except ValueError:
                numbers[key] = -1.0
            if not (key and 0 <= numbers[key] < float("inf")):
                msg = f"--{name} must be such as CPU=2,GPU=1, got {self[name]!r}"
                raise ConfigError(msg)
        return numbers


def run_client(engine: str, main: Callable[[Sequence[str]], int]) -> int:
    """Run `main` as the client of `engine`; its last printed line describes an error."""
    try:
        return main(sys.argv[1:])
    except ConfigError as exc:
        print(str(exc), file=sys.stderr, flush=True)
        return CANNOT_START
    except KeyboardInterrupt:
        print(f"the client of {engine} was interrupted", file=sys.stderr, flush=True)
        return CANNOT_START
