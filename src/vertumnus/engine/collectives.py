"""What the ranks of one group say to each other during a step.

A `GroupLink` is one rank's end of one group. Every member calls the same methods in the same order with tensors of the
same shapes; each returns at once with a `Pending` whose `wait` gives the result, so that work goes on in between.
"""

import contextlib
from typing import Any, Protocol

import torch
from torch import Tensor

from vertumnus.errors import VertumnusError


class GroupBroken(VertumnusError):
    """A member of the group is gone or the group was given up; nothing may be sent on it any more."""


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> Tensor:
        """The result, once all members have sent. Raises GroupBroken if a member is gone."""
        ...


class GroupLink:
    """One rank's end of a group of `degree` ranks; it is number `index` in it, counted from the group's first rank.

    process_group: a torch ProcessGroup whose rank numbers are the indexes; None for a group of one. Tensors on a GPU
    go through host memory where the group's backend (gloo) cannot send them itself (`is_staged`).
    """

    def __init__(self, index: int, degree: int, process_group: Any = None, *, is_staged: bool = False) -> None:
        self.index = index
        self.degree = degree
        self.received_bytes = 0
        """From other ranks, so far."""
        self._group = process_group
        self._is_staged = is_staged

    def all_gather(self, tensor: Tensor) -> Pending:
        """[*shape] of every member -> [degree, *shape], in the order of the members' indexes."""
        if self.degree == 1:
            return _Here(tensor.unsqueeze(0))
        sent = self._outgoing(tensor)
        received = torch.empty((self.degree, *tensor.shape), dtype=sent.dtype, device=sent.device)
        return self._start(
            lambda group: group._allgather_base(received.view(-1), sent.view(-1)), received, sent, tensor.device
        )

    def all_to_all(self, tensor: Tensor) -> Pending:
        """[degree, *shape], entry j for member j -> [degree, *shape], entry j from member j."""
        if self.degree == 1:
            return _Here(tensor)
        sent = self._outgoing(tensor)
        received = torch.empty_like(sent)
        return self._start(lambda group: group.alltoall_base(received, sent, [], []), received, sent, tensor.device)

    def give_up(self) -> None:
        """Ends every wait on this link, in whichever thread, with GroupBroken; and closes its connections, so that the
        other members notice. Nothing can be sent any more."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):  # it may be broken already
                group.abort()

    def _outgoing(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        return tensor.cpu() if self._is_staged else tensor

    def _start(self, send: Any, received: Tensor, sent: Tensor, device: torch.device) -> Pending:
        self.received_bytes += received.nbytes * (self.degree - 1) // self.degree
        group = self._group
        if group is None:
            raise GroupBroken("the group was given up")
        try:
            work = send(group)
        except RuntimeError as error:
            raise GroupBroken(str(error)) from error
        return _Exchange(work, received, sent, device)


class _Here:
    """A group of one has nobody to wait for."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        return self._tensor


class _Exchange:
    __slots__ = ("_device", "_received", "_sent", "_work")

    def __init__(self, work: Any, received: Tensor, sent: Tensor, device: torch.device) -> None:
        self._work = work
        self._received = received
        self._sent = sent  # must outlive the exchange
        self._device = device

    def wait(self) -> Tensor:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._work = None  # it would keep the connections open for as long as somebody looks at the error
            raise GroupBroken(str(error)) from error
        return self._received.to(self._device)
