"""What a composition would do to the traffic: every arrival replayed through many compositions at once.

A shadow of a composition keeps one number per worker, the instant at which its queue runs dry, and sends each request
to the worker of least J (FIFO, prefixes as they were where the request really ran). All compositions see the same
arrivals, so that their differences are far sharper than their values.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vertumnus.core.composition import Composition
from vertumnus.core.controller import Arrivals
from vertumnus.core.cost import CostModel, FloatArray
from vertumnus.core.slices import Slices

_SLICE_PLACEMENTS = 6000
"""Requests times compositions replayed between two yields: one to a few milliseconds."""


class Replayed(NamedTuple):
    """Of n arrivals in K shadows, seconds, [n, K] each."""

    wait_s: FloatArray
    service_s: FloatArray

    @property
    def ttft_s(self) -> FloatArray:
        """Wait and service, in a pool that serves in order of arrival."""
        return self.wait_s + self.service_s


class Shadows:
    """Shadows of several compositions, kept from one replay to the next."""

    def __init__(
        self, compositions: Sequence[Composition], cost_model: CostModel, *, beta: float = 2.0, lambda_: float = 0.3
    ) -> None:
        self.compositions = list(compositions)
        self._cost_model = cost_model
        self._beta = beta
        self._lambda = lambda_
        most = max(composition.num_workers for composition in self.compositions)
        # Degree column of each worker, and the instant at which it is free: [K, most workers]; absent ones never are.
        self._columns: NDArray[np.intp] = np.zeros((len(self.compositions), most), dtype=np.intp)
        self._free_s: FloatArray = np.full((len(self.compositions), most), np.inf)
        for row, composition in enumerate(self.compositions):
            start = 0
            for degree, count in composition:
                self._columns[row, start : start + count] = cost_model.degrees.index(degree)
                start += count
            self._free_s[row, :start] = -np.inf

    def skip(self, seconds: float) -> None:
        """Lets time pass in which the queues stay as long as they are: of what is not replayed nothing is known."""
        self._free_s += seconds

    def keep(self, rows: Sequence[int]) -> None:
        """Drops all shadows but these."""
        self.compositions = [self.compositions[row] for row in rows]
        most = max(composition.num_workers for composition in self.compositions)
        self._columns = self._columns[rows, :most]
        self._free_s = self._free_s[rows, :most]

    def replay(self, arrivals: Arrivals) -> Slices[Replayed]:
        """Predicted wait and service of every arrival in every shadow.

        Resumable: yields after every slice and returns the result. Each request goes to the worker of least
        J = q + beta*E_C(R, P) + lambda*C*E_C(R, P): the third term of J without its C_min part, which is the same for
        all candidates here as they share R and P.
        """
        degrees = np.array(self._cost_model.degrees)
        prefix = arrivals.prefix_tokens[:, None]
        service = self._cost_model.for_degrees(degrees).prefill_s(arrivals.input_tokens[:, None] - prefix, prefix)
        price = (self._beta + self._lambda * degrees) * service
        free_s, rows = self._free_s, np.arange(len(self.compositions))
        replayed = Replayed(*np.empty((2, len(arrivals), len(self.compositions))))
        slice_requests = max(1, _SLICE_PLACEMENTS // len(self.compositions))
        for start in range(0, len(arrivals), slice_requests):
            end = min(start + slice_requests, len(arrivals))
            prices = price[start:end, self._columns]
            services = service[start:end, self._columns]
            for index in range(start, end):
                arrival_s = arrivals.arrival_s[index]
                begin_s = np.maximum(free_s, arrival_s)
                best = (begin_s + prices[index - start]).argmin(axis=1)
                begun_s, taken_s = begin_s[rows, best], services[index - start, rows, best]
                free_s[rows, best] = begun_s + taken_s
                replayed.wait_s[index] = begun_s - arrival_s
                replayed.service_s[index] = taken_s
            yield
        return replayed
