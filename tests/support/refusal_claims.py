"""Claims about errors: bad arguments raise on one rank, calls that differ raise on all alike."""

from __future__ import annotations

from collections.abc import Callable

import torch

from braid.comm import Buffer, Group
from braid.errors import ConfigError, MismatchError
from support.claims import Claim, needs

__all__ = ["MISMATCHES", "REFUSAL_CLAIMS", "check_mismatch"]


def bad_arguments_are_refused(group: Group) -> None:
    """Bad arguments raise on this rank alone, without communication, and are named."""
    x = torch.ones(4)
    odd = torch.ones(group.size + 1) if group.size > 1 else torch.tensor(1.0)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: group.all_reduce(x, "mean"), "mean"),
        (lambda: group.all_reduce(x, algorithm="magic"), "magic"),
        (lambda: group.all_reduce(x, wire="int7"), "int7"),
        (lambda: group.all_reduce(x.double(), wire="bf16"), "float64"),
        (lambda: group.all_reduce(x, "max", wire="bf16"), "max"),
        (lambda: group.all_reduce(x, wire="bf16", algorithm="direct"), "direct"),
        (lambda: group.persistent("broadcast", x, wire="bf16"), "bf16"),
        (lambda: group.gather(x, algorithm="ring"), "ring"),
        (
            lambda: group.all_to_all([x] * group.size, out=[x] * group.size, algorithm="pairwise"),
            "pairwise",
        ),
        (lambda: group.all_reduce([1.0]), "list"),  # type: ignore[call-overload]
        (lambda: group.all_reduce(torch.ones(2, device="meta")), "meta"),
        (lambda: group.all_reduce(torch.ones(2).to_sparse()), "sparse"),
        (lambda: group.all_reduce(torch.ones(2, dtype=torch.bool), "avg"), "bool"),
        (lambda: group.all_reduce(torch.ones(1).expand(4)), "expanded"),
        (lambda: group.all_reduce(torch.ones(2).to(torch.uint16), "avg"), "uint16"),
        (lambda: group.reduce_scatter([1.0]), "list"),  # type: ignore[list-item]
        (lambda: group.all_to_all([1.0]), "list"),  # type: ignore[call-overload]
        (lambda: group.persistent("all_reduce", [1.0]), "list"),  # type: ignore[list-item]
        (lambda: group.broadcast(x, group.size), str(group.size)),
        (lambda: group.reduce_scatter(odd), "multiple"),
        (lambda: group.all_gather(x, out=torch.ones(1, 1)), "[1, 1]"),
        (lambda: group.send(x, group.rank), "itself"),
        (lambda: group.split(-3), "-3"),
        (lambda: group.persistent("barrier", x), "barrier"),
        (lambda: group.persistent("all_reduce", torch.ones(4, 4).t()), "contiguous"),
    ]
    for call, part in calls:
        try:
            call()
        except ConfigError as error:
            assert part in str(error), error  # noqa: PT017 - not a pytest module
        else:
            msg = f"no ConfigError that names {part!r}"
            raise AssertionError(msg)
    group.barrier()


def wrong_parts_are_refused(group: Group) -> None:
    """Wrong parts raise without communication, and are named."""
    n, me = group.size, group.rank
    x = torch.ones(4)
    wrong_count = [torch.ones(1)] * (n + 1)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: group.all_gather(x, out=wrong_count), str(n + 1)),
        (lambda: group.all_gather(x, out=[torch.ones(5)] * n), "out["),
        (lambda: group.all_gather(x, out=[torch.ones(4, dtype=torch.int64)] * n), "int64"),
        (lambda: group.reduce_scatter(wrong_count), str(n + 1)),
        (lambda: group.all_to_all([x] * n), "sequence"),  # type: ignore[call-overload]
        (lambda: group.gather(x, n), str(n)),
        (lambda: group.scatter(x if me else None, out=x), "root"),
        (lambda: group.scan(x, "max", exclusive=True), "exclusive"),
        (lambda: group.recv(x, me), "itself"),
        (lambda: group.send(x, (me + 1) % n, tag=1 << 62), "tag")
        if n > 1
        else (lambda: group.split(-1), "-1"),
        (lambda: group.all_reduce(torch.ones(2, dtype=torch.int32), "median"), "median"),
        (lambda: group.all_reduce(torch.ones(2), "band"), "float32"),
        (lambda: group.all_reduce(Buffer(0, 3, torch.float32)), "address"),
        (lambda: group.all_reduce(Buffer(64, 3, "float32")), "a dtype of torch"),  # type: ignore[arg-type]
        (lambda: group.broadcast(x, 0, algorithm="direct"), "direct"),
    ]
    for call, part in calls:
        try:
            call()
        except ConfigError as error:
            assert part in str(error), error  # noqa: PT017 - not a pytest module
        else:
            msg = f"no ConfigError that names {part!r}"
            raise AssertionError(msg)
    group.barrier()


@needs("adopts")
def registered_needs_registered_tensors(group: Group) -> None:
    """The algorithm `registered` raises alike on every rank if a tensor is in ordinary memory."""
    part = group.split(0)
    assert part is not None
    x = part.empty((64,)).fill_(1.0) if group.rank else torch.ones(64)
    try:
        part.all_reduce(x, algorithm="registered")
    except ConfigError as error:
        assert "ranks [0]" in str(error)  # noqa: PT017 - not a pytest module
    else:
        raise AssertionError
    group.barrier()


REFUSAL_CLAIMS: tuple[Claim, ...] = (
    bad_arguments_are_refused,
    wrong_parts_are_refused,
    registered_needs_registered_tensors,
)


def _four(g: Group) -> object:
    return g.all_reduce(torch.ones(4))


def _two_in_order(g: Group) -> None:
    g.all_reduce(torch.ones(4))
    g.broadcast(torch.ones(2), 0)


def _two_in_another_order(g: Group) -> None:
    g.broadcast(torch.ones(2), 0)
    g.all_reduce(torch.ones(4))


# the call of the other ranks, the call of the last rank
MISMATCHES: dict[str, tuple[Callable[[Group], object], Callable[[Group], object]]] = {
    "shape": (_four, lambda g: g.all_reduce(torch.ones(5))),
    "dtype": (_four, lambda g: g.all_reduce(torch.ones(4, dtype=torch.float64))),
    "reduction": (_four, lambda g: g.all_reduce(torch.ones(4), "max")),
    "operation": (_four, lambda g: g.broadcast(torch.ones(4), 0)),
    "algorithm": (_four, lambda g: g.all_reduce(torch.ones(4), algorithm="two_phase")),
    "order": (_two_in_order, _two_in_another_order),
    "barrier": (_four, lambda g: g.barrier()),
    "parts": (
        _four,
        lambda g: g.all_to_all([torch.ones(1)] * g.size, out=[torch.ones(1)] * g.size),
    ),
    "large": (_four, lambda g: g.all_reduce(torch.ones(400_000))),
    "root": (lambda g: g.broadcast(torch.ones(4), 0), lambda g: g.broadcast(torch.ones(4), 1)),
    "root of a sum": (lambda g: g.reduce(torch.ones(4), 0), lambda g: g.reduce(torch.ones(4), 1)),
    "root that gathers": (
        lambda g: g.gather(torch.ones(2), 0),
        lambda g: g.gather(torch.ones(2), 1),
    ),
}


def check_mismatch(group: Group, kind: str) -> str:
    """Check that every rank raises the same MismatchError, with the odd rank marked.

    Returns:
        Text of the error.
    """
    last = group.rank == group.size - 1
    try:
        MISMATCHES[kind][last](group)
    except MismatchError as error:
        text = str(error)
    else:
        msg = f"no MismatchError on rank {group.rank} for another {kind}"
        raise AssertionError(msg)
    for rank in range(group.size):
        assert f"rank {rank}  " in text, text
    if group.size > 2:
        marked = [line for line in text.splitlines() if "<-- differs" in line]
        assert [line.split()[1] for line in marked] == [str(group.size - 1)], text
    return text
