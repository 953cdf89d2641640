"""Traces out: the Mooncake schema that other tools read, or our own, which keeps everything."""

import gzip
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal

import numpy as np
import zstandard

from vertumnus.errors import ConfigError
from vertumnus.workload.formats import MOONCAKE_BLOCK_TOKENS, OWN_SCHEMA, OWN_VERSION, SYNTHESISED_KEY
from vertumnus.workload.output import replacing
from vertumnus.workload.trace import Trace

Schema = Literal["mooncake", "vertumnus"]


def write_trace(
    trace: Trace, path: str | os.PathLike[str], *, schema: Schema | None = None, force: bool = False
) -> None:
    """Writes a trace to a file, whole or not at all, or to standard output for "-".

    The suffix .gz or .zst compresses. Without a `schema` it is Mooncake's if that can say what the trace says (ids
    for all 512-token blocks), else our own. Mooncake's time stamps are whole milliseconds, ours keep every digit.
    Equal traces give equal bytes. Raises ConfigError if the path exists and `force` is not given.
    """
    if schema is None:
        schema = "mooncake" if fits_mooncake(trace) else "vertumnus"
    elif schema == "mooncake" and not fits_mooncake(trace):
        raise ConfigError(
            f"schema is 'mooncake', but trace {trace.name!r} lacks ids for all its blocks of {MOONCAKE_BLOCK_TOKENS} "
            "tokens; accepted: 'vertumnus'"
        )
    elif schema not in ("mooncake", "vertumnus"):
        raise ConfigError(f"schema is {schema!r}; accepted: 'mooncake', 'vertumnus'")
    lines = _mooncake_lines(trace) if schema == "mooncake" else _own_lines(trace)
    if str(path) == "-":
        sys.stdout.writelines(lines)
        return
    with replacing(path, force=force) as temporary, temporary.open("wb") as file:
        _write(lines, file, Path(path).suffix)


def fits_mooncake(trace: Trace) -> bool:
    """Whether the Mooncake schema can hold the trace: every 512-token block named, a partial last one included."""
    num_needed = -(-trace.input_tokens // MOONCAKE_BLOCK_TOKENS)
    return (
        trace.has_block_ids
        and trace.block_tokens == MOONCAKE_BLOCK_TOKENS
        and bool((np.diff(trace.block_offsets) == num_needed).all())
    )


def _write(lines: Iterator[str], file: IO[bytes], suffix: str) -> None:
    encoded = (line.encode() for line in lines)
    if suffix == ".gz":
        # No file name and no time in the header: equal traces give equal bytes.
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
            packed.writelines(encoded)
    elif suffix == ".zst":
        with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as packed_stream:
            for line in encoded:
                packed_stream.write(line)
    else:
        file.writelines(encoded)


def _rows(trace: Trace) -> Iterator[tuple[float, int, int, list[int]]]:
    offsets = trace.block_offsets.tolist()
    for index, (arrival_s, num_in, num_out) in enumerate(
        zip(trace.arrival_s.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    ):
        yield arrival_s, num_in, num_out, trace.block_ids[offsets[index] : offsets[index + 1]].tolist()


def _mooncake_lines(trace: Trace) -> Iterator[str]:
    mark = f', "{SYNTHESISED_KEY}": {json.dumps(trace.name)}' if trace.synthesised else ""
    for arrival_s, num_in, num_out, ids in _rows(trace):
        yield (
            f'{{"timestamp": {round(arrival_s * 1000)}, "input_length": {num_in}, "output_length": {num_out}, '
            f'"hash_ids": {ids}{mark}}}\n'
        )
        mark = ""


def _own_lines(trace: Trace) -> Iterator[str]:
    header = {
        "schema": OWN_SCHEMA,
        "version": OWN_VERSION,
        "name": trace.name,
        "block_tokens": trace.block_tokens,
        "has_block_ids": trace.has_block_ids,
        "synthesised": trace.synthesised,
    }
    yield json.dumps(header) + "\n"
    for arrival_s, num_in, num_out, ids in _rows(trace):
        blocks = f', "block_ids": {ids}' if trace.has_block_ids else ""
        yield f'{{"arrival_s": {arrival_s!r}, "input_tokens": {num_in}, "output_tokens": {num_out}{blocks}}}\n'
