"""How much of a composition's capacity some traffic takes, if requests go where they belong.

Summing each request's service time at its preferred degree says little: every request prefers the largest degree, and
there are few such workers. Here the longest requests fill the workers of the largest degree, the next ones those of
the next, until all workers are equally loaded, each relative to its kappa. That load is the least that any division by
length can reach.
"""

from collections.abc import Mapping

from vertumnus.core.capacity import LengthMix
from vertumnus.core.composition import Composition
from vertumnus.core.cost import CostModel

_HALVINGS = 40


def load_ratio(mix: LengthMix, composition: Composition, costs: CostModel, kappa: Mapping[int, float]) -> float:
    """Share of its capacity that every worker is loaded with; above 1 the demand is beyond the capacity.

    Infinite where no worker has any capacity.
    """
    low, high = 0.0, 1.0
    if composition.capacity(kappa) <= 0:
        return float("inf")
    while not _fits(mix, composition, costs, kappa, high):
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(mix, composition, costs, kappa, middle) else (middle, high)
    return high


def _fits(mix: LengthMix, composition: Composition, costs: CostModel, kappa: Mapping[int, float], load: float) -> bool:
    """Whether all the traffic finds room if no worker is loaded with more than this share of its kappa."""
    rooms = [(degree, load * count * kappa[degree]) for degree, count in composition if kappa[degree] > 0]
    degree, room_s_per_s = rooms.pop()
    for length in reversed(mix.classes):
        left_per_s = length.arrivals_per_s
        prefix_tokens = length.input_tokens - length.suffix_tokens
        while True:
            service_s = costs.prefill_s(length.suffix_tokens, prefix_tokens, degree)
            if left_per_s * service_s <= room_s_per_s:
                room_s_per_s -= left_per_s * service_s
                break
            left_per_s -= room_s_per_s / service_s
            if not rooms:
                return False
            degree, room_s_per_s = rooms.pop()
    return True
