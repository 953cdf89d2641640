"""Ends a growing text at the first stop string, and holds back no more of it than could still become one."""

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Text goes in piece by piece, what a client may see comes out; how the text is cut into pieces changes nothing.

    The stop string that is complete first ends the text; of several that end at one character, the longest.
    Amortised cost: one comparison per character and stop string (Knuth, Morris and Pratt).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._borders = [_borders(stop) for stop in self._stops]
        self._num_matched = [0] * len(self._stops)
        self._held = ""
        self.is_stopped = False

    def feed(self, text: str) -> str:
        """The next visible text. Nothing more is visible once a stop string was found."""
        if self.is_stopped:
            return ""
        known = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            longest = 0
            for number, stop in enumerate(self._stops):
                matched, borders = self._num_matched[number], self._borders[number]
                while matched and stop[matched] != character:
                    matched = borders[matched - 1]
                matched += stop[matched] == character
                if matched == len(stop):
                    longest = max(longest, matched)
                    matched = 0  # never read on: the text ends here
                self._num_matched[number] = matched
            if longest:
                self.is_stopped = True
                self._held = ""
                return known[: position - longest]
        num_held = max(self._num_matched, default=0)
        self._held = known[len(known) - num_held :]
        return known[: len(known) - num_held]

    def finish(self) -> str:
        """What was held back, where the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders, matched = [0] * len(stop), 0
    for end in range(1, len(stop)):
        while matched and stop[end] != stop[matched]:
            matched = borders[matched - 1]
        matched += stop[end] == stop[matched]
        borders[end] = matched
    return borders
