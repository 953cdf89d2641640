"""Garbage collections that do not hold the event loop up."""

import gc

__all__ = ["collect_rarely"]

THRESHOLDS = (2_000, 5, 100_000)


def collect_rarely() -> None:
    """Leaves out of all collections what is there now, keeps those of young objects small, and does without full ones.

    To be called once everything is set up. A full collection looks at every block that the pool knows, for tens of
    milliseconds, and finds nothing: what serves a request is freed by counting, and the few cycles die young. Fewer
    and larger collections of young objects would take as long in all, but at one time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
