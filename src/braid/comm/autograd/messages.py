"""send, recv and exchange with gradients: the gradient is sent back to the sender.

send returns a token without elements, which represents the message in the sender's graph: `join` it
to a tensor on which backward is called (`loss = join(loss, token)`). Otherwise the receiver waits
for a backward that never runs.

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
        group: Group of sender and receiver.
        x: Tensor to send.
        to: Group rank of the receiver.
        tag: Tag of the message; backward uses the same tag.

    Returns:
        A token of shape (0,), to join to a tensor on which backward is called.

    Backward: recv(to), the receiver's gradient. Messages of up to 256 KiB do not wait for the
    receiver; two ranks that send each other more at the same time need `exchange`.

    Cost: l bytes sent forward, l received backward.
    """
    check_call("send", group, x)
    shape = tuple(x.shape)

    def run(t: torch.Tensor) -> torch.Tensor:
        group.send(t, to, tag=tag)
        return t.new_empty(0)

    def dual(g: torch.Tensor) -> torch.Tensor:
        # zero with the token's graph: a second backward reaches this message
        like = g.sum().expand(shape)
        return recv(group, like, to, tag=tag)

    return collective(run, dual, x)


def recv(group: Group, like: torch.Tensor, source: int, *, tag: int = 0) -> torch.Tensor:
    """Return the tensor that the rank `source` sends.

    Args:
        group: Group of sender and receiver.
        like: Tensor with the shape, dtype and device of the message; its gradient is zero.
        source: Group rank of the sender.
        tag: Tag of the message.

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
    """Send `x` to one rank while receiving an equal shape from another, such as in a ring.

    Args:
        group: Ranks that take part.
        x: Tensor of the same shape on sender and receiver.
        to: Group rank of the receiver.
        source: Group rank of the sender. It may be this rank only if `to` is this rank as well,
            as in a ring of one rank.
        tag: Tag of both messages.

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
