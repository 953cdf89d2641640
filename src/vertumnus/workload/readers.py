"""Traces in: any accepted format, recognised by content, read line by line, checked field by field."""

import gzip
import io
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import IO, Any, cast

import zstandard

from vertumnus.errors import ConfigError, TraceError
from vertumnus.workload.columns import Columns, shown_value
from vertumnus.workload.formats import (
    ACCEPTED,
    AZURE,
    AZURE_COLUMNS,
    OWN_SCHEMA,
    OWN_VERSION,
    SYNTHESISED_KEY,
    Layout,
    own_layout,
    recognised,
)
from vertumnus.workload.trace import Trace

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

_SUFFIXES = re.compile(r"(\.(gz|zst|jsonl|json|csv))+$")
_ISO_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|([+-])(\d\d):?(\d\d))?", re.ASCII)


def read_trace(path: str | PathLike[str], *, spread: bool = True, seed: int = 0, limit: int | None = None) -> Trace:
    """A trace from a file, or from standard input for "-".

    The format (see docs/traces.md) and its compression are recognised by content. Arrivals out of order are sorted
    and counted in `Trace.warnings`; the first arrival becomes 0 s; coarse stamps are spread by `seed` unless told not
    to (see `Trace.spread`). With a `limit` nothing after that many requests is read. Raises TraceError, naming file
    and line, for what cannot be read.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; accepted: 1 or more requests")
    shown = "<standard input>" if str(path) == "-" else str(path)
    columns = Columns(shown, limit)
    with _opened(path, shown) as text:
        try:
            _read(text, columns)
        except UnicodeDecodeError as error:
            raise columns.fail_after(f"the text is not UTF-8 ({error.reason})") from None
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            raise columns.fail_after(f"the file is damaged ({error})") from None
    trace = columns.trace("stdin" if str(path) == "-" else _SUFFIXES.sub("", Path(path).name))
    return trace.spread(seed) if spread else trace


@contextmanager
def _opened(path: str | PathLike[str], shown: str) -> Iterator[io.TextIOWrapper]:
    """The text of a plain, gzip or zstd file. Closes afterwards what it opened, so not standard input."""
    if str(path) == "-":
        source = io.BufferedReader(cast(Any, sys.stdin.buffer))
        text = io.TextIOWrapper(_decompressed(source), encoding="utf-8-sig")
        try:
            yield text
        finally:
            text.detach()
            source.detach()
        return
    try:
        file = Path(path).open("rb")  # noqa: SIM115 (only the opening is guarded; it is closed below)
    except OSError as error:
        raise TraceError(f"trace {shown!r} cannot be opened ({error.strerror}); accepted: a readable file") from None
    with file, io.TextIOWrapper(_decompressed(file), encoding="utf-8-sig") as text:
        yield text


def _decompressed(file: io.BufferedReader) -> IO[bytes]:
    """The stream itself, or what unpacks it, by the magic bytes at its start."""
    head = file.peek(4)
    if head.startswith(GZIP_MAGIC):
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    if head.startswith(ZSTD_MAGIC):
        return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    return file


def _read(text: io.TextIOWrapper, columns: Columns) -> None:
    """Recognises the format by the first line that is not blank and reads all requests into the columns."""
    for line in text:
        columns.line_number += 1
        if line.strip():
            break
    else:
        raise TraceError(f"trace {columns.shown!r} is empty; accepted: at least one request")
    if line.lstrip().startswith("{"):
        first = columns.parsed(line)
        if "schema" in first:
            columns.layout = _own_layout(first, columns)
            _read_objects(text, columns)
        elif layout := recognised(first):
            columns.layout = layout
            _read_objects(chain([line], text), columns, first_line_number=columns.line_number)
        else:
            fields = ", ".join(map(repr, first)) or "no field"
            raise columns.fail(f"the format is unknown (the first object has {fields}); accepted: {ACCEPTED}")
    elif set(AZURE_COLUMNS) <= {name.strip() for name in line.split(",")}:
        _read_azure(text, [name.strip() for name in line.split(",")], columns)
    else:
        raise columns.fail(
            f"the format is unknown (the first line is {shown_value(line.strip())}); accepted: {ACCEPTED}"
        )


def _own_layout(header: dict[str, Any], columns: Columns) -> Layout:
    """The layout that the header line of our own schema announces; takes the trace's name from it too."""
    schema, version = header.pop("schema"), header.pop("version", None)
    if schema != OWN_SCHEMA or version != OWN_VERSION:
        raise columns.fail(
            f"schema and version are {shown_value(schema)} and {shown_value(version)}; "
            f"accepted: {OWN_SCHEMA!r} and {OWN_VERSION}"
        )
    block_tokens = columns.whole("block_tokens", header.pop("block_tokens", None), 1)
    has_block_ids, columns.synthesised = header.pop("has_block_ids", True), header.pop("synthesised", False)
    columns.name = header.pop("name", None)
    if not (isinstance(has_block_ids, bool) and isinstance(columns.synthesised, bool)):
        raise columns.fail("has_block_ids and synthesised in the header; accepted: true or false")
    if not isinstance(columns.name, str | None):
        raise columns.fail(f"name is {shown_value(columns.name)}; accepted: a string")
    if header:
        raise columns.fail(
            f"the header has an unknown field {next(iter(header))!r}; "
            "accepted: schema, version, name, block_tokens, has_block_ids, synthesised"
        )
    return own_layout(block_tokens, has_block_ids)


def _read_objects(lines: Iterable[str], columns: Columns, first_line_number: int | None = None) -> None:
    layout = columns.layout
    if first_line_number is not None:
        columns.line_number = first_line_number - 1
    for line in lines:
        columns.line_number += 1
        if not line.strip():
            continue
        fields = columns.parsed(line)
        if SYNTHESISED_KEY in fields:
            columns.synthesised, columns.name = True, str(fields[SYNTHESISED_KEY])
        for key in (layout.time_key, layout.input_key, layout.output_key, layout.blocks_key):
            if key is not None and key not in fields:
                raise columns.fail(f"{key} is missing; accepted: every request has it")
        columns.add(
            fields[layout.time_key],
            fields[layout.input_key],
            fields[layout.output_key],
            fields[layout.blocks_key] if layout.blocks_key else None,
        )
        if columns.is_full():
            return


def _read_azure(lines: Iterable[str], names: list[str], columns: Columns) -> None:
    time_at, input_at, output_at = (names.index(name) for name in AZURE_COLUMNS)
    columns.layout = AZURE
    midnight_s: float | None = None
    for line in lines:
        columns.line_number += 1
        if not line.strip():
            continue
        cells = [cell.strip().strip('"') for cell in line.split(",")]
        if len(cells) != len(names):
            raise columns.fail(f"the line has {len(cells)} fields; accepted: {len(names)}, as in the heading")
        second_s, fraction_s = _iso_time_s(cells[time_at], columns)
        # Only the offset from the first second keeps 100 ns apart in a float.
        midnight_s = second_s if midnight_s is None else midnight_s
        columns.add(second_s - midnight_s + fraction_s, _number(cells[input_at]), _number(cells[output_at]), None)
        if columns.is_full():
            return


def _number(cell: str) -> int | str:
    """The whole number in a CSV cell, or the cell itself for the length check to reject."""
    return int(cell) if re.fullmatch(r"[+-]?\d{1,18}", cell, re.ASCII) else cell


def _iso_time_s(cell: str, columns: Columns) -> tuple[float, float]:
    """Whole seconds since the epoch and the fraction, of a date and time with up to nine decimals."""
    try:
        match = _ISO_TIME.fullmatch(cell)
        if match is None:
            raise ValueError
        text, fraction, sign, hours, minutes = match.groups()
        second_s = datetime.fromisoformat(text).replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        raise columns.fail(
            f"TIMESTAMP is {shown_value(cell)}; accepted: a date and time such as 2023-11-16 18:17:03.9799600"
        ) from None
    if sign:
        second_s -= (1 if sign == "+" else -1) * (int(hours) * 3600 + int(minutes) * 60)
    return second_s, float(f"0.{fraction}") if fraction else 0.0
