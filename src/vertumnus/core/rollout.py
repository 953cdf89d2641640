"""What a composition would do to recent traffic: the same arrivals replayed through many compositions at once.

A rollout keeps one number per worker, the instant at which its queue runs dry, and sends each request to the worker of
least J (FIFO, prefixes as they were where the request really ran). All compositions see the same arrivals, so that
their differences are far sharper than their values.
"""

from collections.abc import Generator, Sequence

import numpy as np
from numpy.typing import NDArray

from vertumnus.core.composition import Composition
from vertumnus.core.controller import Arrivals
from vertumnus.core.cost import CostModel, FloatArray

SLICE_REQUESTS = 200
"""Requests replayed between two yields: about a millisecond."""


def rollout_ttft_s(
    compositions: Sequence[Composition],
    arrivals: Arrivals,
    cost_model: CostModel,
    *,
    beta: float,
    lambda_: float,
) -> Generator[None, None, FloatArray]:
    """Predicted TTFT (wait + service) of every arrival under every composition: seconds, [num_arrivals, K].

    Resumable: yields after every slice and returns the result. Each request goes to the worker of least
    J = q + beta*E_C(R, P) + lambda*C*E_C(R, P) (the third term of J without its C_min part, which is the same for all
    candidates here as they share R and P).
    """
    degrees = np.array(cost_model.degrees)
    suffix = (arrivals.input_tokens - arrivals.prefix_tokens)[:, None]
    service = cost_model.for_degrees(degrees).prefill_s(suffix, arrivals.prefix_tokens[:, None])
    price = beta * service + lambda_ * degrees * service
    columns, free_s = _workers(compositions, cost_model.degrees)
    rows = np.arange(len(compositions))
    ttft_s = np.empty((len(arrivals), len(compositions)))
    for start in range(0, len(arrivals), SLICE_REQUESTS):
        end = min(start + SLICE_REQUESTS, len(arrivals))
        prices = price[start:end, columns]
        services = service[start:end, columns]
        for index in range(start, end):
            begin_s = np.maximum(free_s, arrivals.arrival_s[index])
            best = (begin_s + prices[index - start]).argmin(axis=1)
            done_s = begin_s[rows, best] + services[index - start, rows, best]
            free_s[rows, best] = done_s
            ttft_s[index] = done_s - arrivals.arrival_s[index]
        yield
    return ttft_s


def _workers(compositions: Sequence[Composition], degrees: Sequence[int]) -> tuple[NDArray[np.intp], FloatArray]:
    """(degree column of each worker, instant at which it is free), [K, most workers]; absent ones are never free."""
    most = max(composition.num_workers for composition in compositions)
    columns = np.zeros((len(compositions), most), dtype=np.intp)
    free_s = np.full((len(compositions), most), np.inf)
    for row, composition in enumerate(compositions):
        start = 0
        for degree, count in composition:
            columns[row, start : start + count] = degrees.index(degree)
            start += count
        free_s[row, :start] = -np.inf
    return columns, free_s
