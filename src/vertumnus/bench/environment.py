"""Where a benchmark ran: what a reader needs to judge its figures, and no path or host name."""

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("numpy", "blake3", "torch", "transformers")
"""Those of them that are installed."""


def environment(command: str) -> dict[str, Any]:
    """Hardware, versions, commit, command and date."""
    return {
        "hardware": _cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: version for package in _PACKAGES if (version := _version(package)) is not None},
        "vertumnus": metadata.version("vertumnus"),
        "commit": _commit(),
        "command": command,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    """The processor's name where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _commit() -> str | None:
    """The commit of the source tree, marked if it was changed since; None outside a repository."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD")
    if commit is None or git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return f"{commit} with changes" if git("status", "--porcelain", "--untracked-files=no", ":/src") else commit
