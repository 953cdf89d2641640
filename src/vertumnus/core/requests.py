"""What the decision core knows of a request."""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_PRIORITY = 1000


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """One prompt to be prefilled.

    `blocks` are the chained hashes of its full KV blocks, root first (16 bytes each); no token or text is known here.
    `priority`: smaller goes first, within MAX_PRIORITY of 0; equal ones go in the order of the queue's discipline.
    """

    request_id: int
    arrival_s: float
    input_tokens: int
    blocks: Sequence[bytes]
    priority: int = 0
