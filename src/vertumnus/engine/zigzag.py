"""Which of a request's new tokens each rank of a group works on.

R new tokens are cut into 2C chunks, the first R mod 2C of them one token longer than the others. Rank k takes the
chunks k and 2C-1-k, one from the cheap end of the causal triangle and one from the dear one, so that all ranks attend
to about as many pairs. With 10 tokens at degree 2:

    token    0 1 2 | 3 4 5 | 6 7 | 8 9
    chunk      0       1      2     3
    rank       0       1      1     0

Ranks differ by at most one token; where an exchange wants equal shapes, the shorter one pads what it sends.
"""

from typing import NamedTuple


class Share(NamedTuple):
    """A rank's two runs of new tokens, [head_start, head_end) and [tail_start, tail_end), counted from the request's
    first new token. Only on the group's last rank does the tail follow the head at once. The tail, or both, may be
    empty.
    """

    head_start: int
    head_end: int
    tail_start: int
    tail_end: int

    @property
    def num_head(self) -> int:
        return self.head_end - self.head_start

    @property
    def num_tail(self) -> int:
        return self.tail_end - self.tail_start

    @property
    def num_tokens(self) -> int:
        return self.num_head + self.num_tail


def share(num_new_tokens: int, degree: int, index: int) -> Share:
    """What rank `index` of a group of `degree` ranks takes of R new tokens. A group of one takes all as its head."""
    if degree == 1:
        return Share(0, num_new_tokens, num_new_tokens, num_new_tokens)
    chunk_tokens, num_longer = divmod(num_new_tokens, 2 * degree)

    def start(chunk: int) -> int:
        return chunk * chunk_tokens + min(chunk, num_longer)

    mirrored = 2 * degree - 1 - index
    return Share(start(index), start(index + 1), start(mirrored), start(mirrored + 1))


def owner_of_last(num_new_tokens: int, degree: int) -> int:
    """The index of the rank that works on the last of R >= 1 new tokens."""
    if degree == 1:
        return 0
    chunk = min(num_new_tokens, 2 * degree) - 1
    return min(chunk, 2 * degree - 1 - chunk)
