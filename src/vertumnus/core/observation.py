"""What arrived, window by window: the controller's view of the traffic."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from vertumnus.core.controller import Arrivals, Window
from vertumnus.core.long_threshold import LongThreshold


@dataclass(slots=True)
class WindowTracker:
    """Accumulates the arrivals of the current window; `close` turns them into a `Window` and begins the next."""

    window_s: float
    long_threshold: LongThreshold
    start_s: float = 0.0
    _demand_s: float = 0.0
    _num_long: int = 0
    _waited_s: float = 0.0
    _arrival_s: list[float] = field(default_factory=list)
    _input_tokens: list[int] = field(default_factory=list)
    _prefix_tokens: list[int] = field(default_factory=list)

    @property
    def end_s(self) -> float:
        return self.start_s + self.window_s

    def record(self, arrival_s: float, input_tokens: int, prefix_tokens: int, service_s: float) -> None:
        """One arrival, with the prefix and the predicted service at the worker that it was placed on."""
        self._demand_s += service_s
        self._num_long += self.long_threshold.is_long(input_tokens)
        self.long_threshold.add(input_tokens)
        self._arrival_s.append(arrival_s)
        self._input_tokens.append(input_tokens)
        self._prefix_tokens.append(prefix_tokens)

    def record_start(self, arrival_s: float, now_s: float) -> None:
        """The first step of a request that arrived then begins now."""
        self._waited_s += now_s - max(arrival_s, self.start_s)

    def close(self, backlog_s: float, waiting: Iterable[float] = ()) -> Window:
        """Ends the window at its due time, whenever it is called; `waiting`: when those arrived that wait still."""
        waited_s = self._waited_s + sum(self.end_s - min(max(each, self.start_s), self.end_s) for each in waiting)
        arrivals = Arrivals(
            arrival_s=np.array(self._arrival_s, dtype=np.float64),
            input_tokens=np.array(self._input_tokens, dtype=np.float64),
            prefix_tokens=np.array(self._prefix_tokens, dtype=np.float64),
        )
        window = Window(
            start_s=self.start_s,
            end_s=self.end_s,
            demand_s_per_s=self._demand_s / self.window_s,
            backlog_s=backlog_s,
            num_requests=len(self._arrival_s),
            num_long=self._num_long,
            waited_s=waited_s,
            input_tokens=int(arrivals.input_tokens.sum()),
            suffix_tokens=int((arrivals.input_tokens - arrivals.prefix_tokens).sum()),
            arrivals=arrivals,
        )
        self.long_threshold.end_window()
        self.start_s = self.end_s
        self._demand_s = 0.0
        self._num_long = 0
        self._waited_s = 0.0
        self._arrival_s, self._input_tokens, self._prefix_tokens = [], [], []
        return window
