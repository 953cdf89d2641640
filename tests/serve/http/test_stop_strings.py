"""Where a text ends does not depend on how it comes, and nothing is held back without need."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from vertumnus.serve.http.stop_strings import StopStrings

LETTERS = st.text(alphabet="ab", max_size=14)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


def cut_at(text, stops):
    """Naively: (visible text, whether a stop string ended it)."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def longest_start_of_a_stop(text, stops):
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 14), max_size=6))
def test_any_split_of_a_text_shows_the_same(text, stops, cuts):
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    matcher = StopStrings(stops)
    shown = "".join(matcher.feed(text[start:end]) for start, end in pairwise(edges))
    shown += matcher.finish()
    assert (shown, matcher.is_stopped) == cut_at(text, stops)


@given(text=LETTERS, stops=STOPS)
def test_only_what_could_become_a_stop_string_is_held_back(text, stops):
    matcher, shown = StopStrings(stops), ""
    for end in range(1, len(text) + 1):
        shown += matcher.feed(text[end - 1])
        if matcher.is_stopped:
            break
        assert len(shown) == end - longest_start_of_a_stop(text[:end], stops)


def test_of_stop_strings_that_end_together_the_longest_cuts():
    matcher = StopStrings(["c", "abc"])
    assert matcher.feed("xabcd") == "x"
    assert matcher.is_stopped
    assert matcher.feed("more") == matcher.finish() == ""
