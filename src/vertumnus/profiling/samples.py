"""Files of measured prefill times: our own, one JSON object a line, or anybody's as JSON lines or CSV.

{"setup": {"model": "smollm2", "dtype": "bfloat16", ...}}
{"degree": 2, "suffix_tokens": 512, "prefix_tokens": 0, "seconds": 0.31}
{"degree": 2, "suffix_tokens": 64, "prefix_tokens": 256, "seconds": 0.29, "batch": 8}
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vertumnus.core.fit import PrefillSample
from vertumnus.errors import ConfigError

COLUMNS = ("degree", "suffix_tokens", "prefix_tokens", "seconds")
"""C, R, P and the time that one queue-free prefill took. `batch` may stand beside them, others are ignored."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Several equal requests in one step: do they share d, as the cost model says?"""

    degree: int
    num_requests: int
    suffix_tokens: int
    prefix_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SampleLog:
    """What a file holds. samples: of one request each, for the fit. setup: None in a log that is not our own."""

    samples: tuple[PrefillSample, ...]
    packed: tuple[PackedStep, ...]
    setup: Mapping[str, Any] | None = None


def read_samples(path: Path) -> SampleLog:
    """Everything in a file. Raises ConfigError, naming file and line, for what is no sample, and for a file without."""
    setup, samples = _parse(path, _text(path))
    log = _log(setup, samples)
    if not log.samples:
        what = "which has packed steps only" if log.packed else "which is empty"
        raise ConfigError(f"samples are {str(path)!r}, {what}; accepted: one sample of one request a line")
    return log


def resume_samples(path: Path, setup: Mapping[str, Any]) -> SampleLog:
    """What a run that broke off has left; half a line at the end is cut off. Begins the file where there is none.

    Raises ConfigError where the samples were taken under another setup, as they do not belong together then.
    """
    if not path.exists() or not path.stat().st_size:
        begin_samples(path, setup)
        return SampleLog((), (), setup)
    text = _text(path)
    whole = text[: text.rfind("\n") + 1]
    found, samples = _parse(path, whole)
    if found is None:
        raise ConfigError(f"samples are {str(path)!r}, which no run has begun; accepted: one to go on with")
    for key, value in setup.items():
        if found.get(key) != value:
            raise ConfigError(
                f"samples {str(path)!r} were taken with {key} {found.get(key)!r}; accepted with --resume: "
                f"{value!r}, as asked for now"
            )
    if whole != text:
        with path.open("r+b") as file:
            file.truncate(len(whole.encode("utf-8")))
    return _log(found, samples)


def begin_samples(path: Path, setup: Mapping[str, Any]) -> None:
    """An empty file that says what its samples are of. Raises ConfigError if it cannot be written."""
    try:
        path.write_text(json.dumps({"setup": dict(setup)}) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"samples path is {str(path)!r} ({error.strerror}); accepted: a writable path") from None


def append_sample(path: Path, sample: PrefillSample | PackedStep) -> None:
    """Adds one line, written at once: what was measured outlives whatever comes next."""
    fields = {name: getattr(sample, name) for name in COLUMNS}
    if isinstance(sample, PackedStep):
        fields["batch"] = sample.num_requests
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(fields) + "\n")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not a text file"
        raise ConfigError(f"samples are {str(path)!r} ({reason}); accepted: a file of JSON lines or CSV") from None


def _parse(path: Path, text: str) -> tuple[Mapping[str, Any] | None, list[PrefillSample | PackedStep]]:
    setup: Mapping[str, Any] | None = None
    samples = []
    for number, fields in _rows(text, path):
        if isinstance(fields.get("setup"), dict):
            setup = fields["setup"]
        else:
            samples.append(_sample(fields, f"{path}, line {number}"))
    return setup, samples


def _log(setup: Mapping[str, Any] | None, found: Iterable[PrefillSample | PackedStep]) -> SampleLog:
    every = list(found)
    return SampleLog(
        samples=tuple(each for each in every if isinstance(each, PrefillSample)),
        packed=tuple(each for each in every if isinstance(each, PackedStep)),
        setup=setup,
    )


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


def _sample(fields: Mapping[str, Any], where: str) -> PrefillSample | PackedStep:
    numbers = [int(_number(fields, name, where, is_whole=True)) for name in COLUMNS[:3]]
    degree, suffix_tokens, prefix_tokens = numbers
    seconds = _number(fields, "seconds", where)
    batch = 1 if fields.get("batch") in (None, "") else int(_number(fields, "batch", where, is_whole=True))
    if degree < 1 or degree & (degree - 1):
        raise ConfigError(f"{where}: degree is {degree}; accepted: a power of two")
    if batch < 1:
        raise ConfigError(f"{where}: batch is {batch}; accepted: 1 or more")
    try:
        sample = PrefillSample(degree, suffix_tokens, prefix_tokens, seconds)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return sample if batch == 1 else PackedStep(degree, batch, suffix_tokens, prefix_tokens, seconds)


def _number(fields: Mapping[str, Any], name: str, where: str, *, is_whole: bool = False) -> float:
    try:
        value = float(fields[name])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"{where}: {name} is {fields.get(name)!r}; accepted: a number") from None
    if is_whole and not value.is_integer():  # nan and inf are none either
        raise ConfigError(f"{where}: {name} is {value}; accepted: a whole number")
    return value
