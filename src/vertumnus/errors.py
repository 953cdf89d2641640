"""The errors of Vertumnus.

    VertumnusError
    ├── ConfigError (also ValueError)    a value that somebody configured or passed: flag, file, argument
    │   └── TraceError                   a trace that cannot be read: names file and line
    └── InvariantError                   a broken promise of our own code; always a bug

Expected outcomes (no candidate, no room, stale epoch) are return values with a reason, never exceptions.
"""


class VertumnusError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(VertumnusError, ValueError):
    """A bad value from outside. The message names the field, the value and what is accepted, in one sentence."""


class TraceError(ConfigError):
    """A trace that cannot be used. The message names the file and, where there is one, the line."""


class InvariantError(VertumnusError):
    """An internal invariant does not hold; raised by the `check_invariants` methods only."""
