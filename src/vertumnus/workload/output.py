"""Files out: whole or not at all, and never over an existing one unless asked."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vertumnus.errors import ConfigError


def check_writable(path: str | os.PathLike[str], *, force: bool) -> None:
    """Raises ConfigError where `replacing` would, so that a long computation can be refused before it starts."""
    target = Path(path)
    if target.is_dir():
        raise ConfigError(f"output path {str(target)!r} is a directory; accepted: a file")
    if not target.parent.is_dir():
        raise ConfigError(f"output path {str(target)!r} lies in no existing directory; accepted: an existing one")
    if target.exists() and not force:
        raise ConfigError(f"output path {str(target)!r} exists; accepted: a new path, or --force to replace the file")


@contextmanager
def replacing(path: str | os.PathLike[str], *, force: bool = False) -> Iterator[Path]:
    """A temporary path beside `path`, with the same suffixes; it becomes `path` when the block ends without an error.

    After an error nothing is left behind and what was at `path` is untouched. A device or pipe is written directly.
    Raises ConfigError if `path` exists and `force` is not given, or cannot be written.
    """
    check_writable(path, force=force)
    target = Path(path)
    if target.exists() and not target.is_file():
        yield target
        return
    temporary = target.with_name(f".{os.getpid()}.{target.name}")
    try:
        yield temporary
        os.replace(temporary, target)
    except OSError as error:
        raise ConfigError(
            f"output path {str(target)!r} cannot be written ({error.strerror or error}); accepted: a writable path"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
