"""Long work in slices: a generator that yields every few milliseconds and returns its result in the end.

A live loop takes other turns in between; who need not runs it to its end at once.
"""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Slices = Generator[None, None, T]


def finish(work: Slices[T]) -> T:
    """Runs the work to its end at once."""
    while True:
        try:
            next(work)
        except StopIteration as finished:
            result: T = finished.value
            return result
