"""File descriptors: one for every connection, where 1024 are what shells and service managers give unasked."""

import logging
import resource

__all__ = ["connections_that_fit"]

LOG = logging.getLogger(__name__)

RESERVE = 64
PER_RANK = 4
"""Beside clients' connections: sockets, pipes and files that the router opens itself, and for each rank."""


def connections_that_fit(wanted: int, num_ranks: int) -> int:
    """Raises this process's limit as far as it may for so many connections; how many it then has room for."""
    reserved = RESERVE + PER_RANK * num_ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + reserved
    if _is_less(soft, needed):
        soft = hard if _is_less(hard, needed) else needed
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if not _is_less(soft, needed):
        return wanted
    fitting = max(soft - reserved, 1)
    LOG.warning(
        "max_connections is %d, and %d with the %d file descriptors that a process may have here (ulimit -Hn)",
        wanted,
        fitting,
        soft,
    )
    return fitting


def _is_less(limit: int, needed: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < needed
