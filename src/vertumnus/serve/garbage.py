"""Garbage collections that do not hold the event loop up."""

import gc

__all__ = ["collect_rarely"]

THRESHOLDS = (2_000, 5, 100_000)


def collect_rarely() -> None:
    """Leaves out of all collections what is there now, and makes those of everything else rare.

    To be called once everything is set up. A collection over all objects of a busy pool takes tens of milliseconds
    and finds nothing: what serves a request is freed by counting.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
