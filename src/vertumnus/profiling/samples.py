"""Files of measured prefill times: our own, one JSON object a line, or anybody's as JSON lines or CSV."""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vertumnus.core.fit import PrefillSample
from vertumnus.errors import ConfigError

COLUMNS = ("degree", "suffix_tokens", "prefix_tokens", "seconds")
"""C, R, P and the time that one queue-free prefill took. Other columns are ignored."""


def read_samples(path: Path) -> list[PrefillSample]:
    """All samples of a file. Raises ConfigError, naming file and line, for one that is none, and for an empty file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not a text file"
        raise ConfigError(f"samples are {str(path)!r} ({reason}); accepted: a file of JSON lines or CSV") from None
    samples = [_sample(fields, f"{path}, line {number}") for number, fields in _rows(text, path)]
    if not samples:
        raise ConfigError(f"samples are {str(path)!r}, which is empty; accepted: one sample a line")
    return samples


def append_sample(path: Path, sample: PrefillSample) -> None:
    """Adds one line, written at once: what was measured outlives whatever comes next."""
    fields = {name: getattr(sample, name) for name in COLUMNS}
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(fields) + "\n")


def _rows(text: str, path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if lines and not lines[0][1].lstrip().startswith("{"):
        yield from _csv_rows(lines, path)
        return
    for number, line in lines:
        try:
            fields = json.loads(line)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise ConfigError(f"{path}, line {number}: no JSON object; accepted: {', '.join(COLUMNS)} in each")
        yield number, fields


def _csv_rows(lines: list[tuple[int, str]], path: Path) -> Iterable[tuple[int, Mapping[str, Any]]]:
    heading = [name.strip() for name in next(csv.reader([lines[0][1]]))]
    missing = [name for name in COLUMNS if name not in heading]
    if missing:
        raise ConfigError(f"{path} lacks the column {missing[0]!r}; accepted: a heading with {', '.join(COLUMNS)}")
    for number, line in lines[1:]:
        yield number, dict(zip(heading, next(csv.reader([line])), strict=False))


def _sample(fields: Mapping[str, Any], where: str) -> PrefillSample:
    degree, suffix_tokens, prefix_tokens = (_number(fields, name, where, is_whole=True) for name in COLUMNS[:3])
    seconds = _number(fields, "seconds", where)
    try:
        return PrefillSample(int(degree), int(suffix_tokens), int(prefix_tokens), seconds)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _number(fields: Mapping[str, Any], name: str, where: str, *, is_whole: bool = False) -> float:
    try:
        value = float(fields[name])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{where}: {name} is {fields.get(name)!r}; accepted: a number") from None
    if is_whole and not value.is_integer():
        raise ConfigError(f"{where}: {name} is {value}; accepted: a whole number")
    return value
