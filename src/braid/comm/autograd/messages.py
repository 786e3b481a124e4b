"""send, recv and exchange with gradients: the gradient goes back along the message.

A sender gets a token without elements. It stands for the message in the sender's graph: `join` it
to something that backward is called on (`loss = join(loss, token)`), or the receiver waits for a
backward that never comes.

l = bytes of the tensor.
"""

from __future__ import annotations

import torch

from braid.comm import Group
from braid.comm.autograd.arguments import check_call
from braid.comm.autograd.dependency import join
from braid.comm.autograd.linear_map import collective

__all__ = ["exchange", "recv", "send"]


def send(group: Group, x: torch.Tensor, to: int, *, tag: int = 0) -> torch.Tensor:
    """Send `x` to the rank `to`.

    Args:
        group: Ranks between which the message travels.
        x: Tensor that is sent.
        to: Group rank of the receiver.
        tag: Number of the message between the two; backward uses the same.

    Returns:
        A token, shape (0,), to be joined to what backward is called on.

    Backward: recv(to), the receiver's gradient. Messages of up to 256 KiB return at once; two ranks
    that send each other more at the same time need `exchange`.

    Cost: l bytes sent forward, l received backward.
    """
    check_call("send", group, x)
    shape = tuple(x.shape)

    def run(t: torch.Tensor) -> torch.Tensor:
        group.send(t, to, tag=tag)
        return t.new_empty(0)

    def dual(g: torch.Tensor) -> torch.Tensor:
        # 0, and on the graph of the token: a second backward gets here
        like = g.sum().expand(shape)
        return recv(group, like, to, tag=tag)

    return collective(run, dual, x)


def recv(group: Group, like: torch.Tensor, source: int, *, tag: int = 0) -> torch.Tensor:
    """Return the tensor that the rank `source` sends.

    Args:
        group: Ranks between which the message travels.
        like: Tensor that gives shape, dtype and device; its gradient is zero.
        source: Group rank of the sender.
        tag: Number of the message between the two.

    Backward: send(source). The gradient goes to the sender.

    Cost: l bytes received forward, l sent backward.
    """
    check_call("recv", group, like, name="like")

    def run(t: torch.Tensor) -> torch.Tensor:
        return group.recv(torch.empty_like(t), source, tag=tag)

    def dual(g: torch.Tensor) -> torch.Tensor:
        token = send(group, g, source, tag=tag)
        return join(g.new_zeros(()).expand(g.shape), token)

    return collective(run, dual, like)


def exchange(group: Group, x: torch.Tensor, *, to: int, source: int, tag: int = 0) -> torch.Tensor:
    """Send `x` to one rank while receiving as much from another, such as one step around a ring.

    Args:
        group: Ranks that take part.
        x: Tensor of the same shape on sender and receiver.
        to: Group rank of the receiver.
        source: Group rank of the sender; this rank itself only together with `to`, for rings of
            one.
        tag: Number of the message between the two.

    Backward: exchange in the other direction.

    Cost: l bytes each way, forward and backward.
    """
    check_call("exchange", group, x)

    def run(t: torch.Tensor) -> torch.Tensor:
        if to == source == group.rank:
            return t.clone()
        received = torch.empty_like(t)
        with group.coalesce() as batch:
            batch.send(t, to, tag=tag)
            batch.recv(received, source, tag=tag)
        batch.work.wait()
        return received

    return collective(run, lambda g: exchange(group, g, to=source, source=to, tag=tag), x)
