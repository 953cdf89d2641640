"""The errors of the engine's processes.

    VertumnusError
    ├── WireError            a frame or message that cannot be understood, or is too large to send
    ├── RankError            one rank; carries its number
    │   ├── RankLost         it died, or its connection did
    │   ├── RankTimeout      it did not answer in time
    │   └── RankFailed       it answered that something broke: its own words follow
    ├── CopyFailed           a block copy that could not be finished: the source is gone, or gave the lease up
    ├── PoolError            the pool as a whole: it could not start, is closed, or gave up recovering
    │   └── GroupUnready     the group lost a member and is being formed anew
    └── GroupBroken          (in `collectives`) a member of a group is gone in the middle of an exchange

Expected outcomes (a step of another epoch, a slot under lease) are `Refusal` values, not errors.
"""

from vertumnus.errors import VertumnusError


class WireError(VertumnusError):
    """What came over a socket is not one of the messages of `messages`, or a message cannot be encoded."""


class RankError(VertumnusError):
    """`rank` is the number in the pool."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank} {message}")
        self.rank = rank


class RankLost(RankError):
    """The rank's process is gone; its weights and KV with it. The pool starts it again by itself."""


class RankTimeout(RankError):
    """No answer within the bound; the rank may still be at it."""


class RankFailed(RankError):
    """The rank lives but could not do what it was asked. `is_cause`: it broke here, not at another member."""

    def __init__(self, rank: int, message: str, *, is_cause: bool) -> None:
        super().__init__(rank, message)
        self.is_cause = is_cause


class CopyFailed(VertumnusError):
    """Nothing of the failed block may be used; blocks that were reported as installed are good."""


class PoolError(VertumnusError):
    """The pool cannot be used any more, or never could."""


class GroupUnready(PoolError):
    """Nothing was done; `RankPool.whole` tells when the group can be used again."""
