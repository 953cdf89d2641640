"""The requests of a trace while it is read: every field is checked on its way in, and knows its file and line."""

import json
from array import array
from typing import Any

import numpy as np

from vertumnus.errors import TraceError
from vertumnus.workload.formats import AZURE
from vertumnus.workload.trace import MAX_TOKENS, IntArray, Trace, num_unchained, numbered_by_appearance

MAX_STAMP = 1 << 53
"""Largest time stamp that is believed, in its own unit: the last whole number a float tells from its neighbours."""


def shown_value(value: object) -> str:
    """A value as a message quotes it: on one line, and not longer than a line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Columns:
    """The requests read so far; checks every field on its way in and knows which line is being read."""

    def __init__(self, shown: str, limit: int | None) -> None:
        self.shown = shown
        self.limit = limit
        self.layout = AZURE
        self.line_number = 0
        self.name: str | None = None
        self.synthesised = False
        self.stamps = array("d")
        self.input_tokens = array("q")
        self.output_tokens = array("q")
        self.block_ids = array("q")
        self.block_offsets = array("q", [0])
        self.id_of_hash: dict[str, int] = {}
        self.num_overlong = 0

    def fail(self, problem: str) -> TraceError:
        return TraceError(f"{self.shown}, line {self.line_number}: {problem}")

    def fail_after(self, problem: str) -> TraceError:
        """Of what happens while the stream is read ahead, somewhere behind the current line."""
        return TraceError(f"{self.shown}, after line {self.line_number}: {problem}; accepted: whole UTF-8 text files")

    def is_full(self) -> bool:
        return len(self.stamps) == self.limit

    def parsed(self, line: str) -> dict[str, Any]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self.fail(
                f"the line {shown_value(line.strip())} is no JSON ({getattr(error, 'msg', 'too deep or too large')}); "
                "accepted: one JSON object a line"
            ) from None
        if not isinstance(value, dict):
            raise self.fail(f"the line is {shown_value(value)}; accepted: one JSON object a line")
        return value

    def whole(self, field: str, value: object, least: int) -> int:
        if type(value) is not int or not least <= value <= MAX_TOKENS:
            raise self.fail(f"{field} is {shown_value(value)}; accepted: a whole number from {least} to {MAX_TOKENS}")
        return value

    def add(self, stamp: object, input_tokens: object, output_tokens: object, hashes: object) -> None:
        layout = self.layout
        if type(stamp) not in (int, float) or not abs(stamp) <= MAX_STAMP:  # type: ignore[arg-type]
            raise self.fail(
                f"{layout.time_key} is {shown_value(stamp)}; accepted: a number between -{MAX_STAMP} and {MAX_STAMP}"
            )
        num_tokens = self.whole(layout.input_key, input_tokens, 1)
        self.output_tokens.append(self.whole(layout.output_key, output_tokens, 0))
        self.stamps.append(stamp)  # type: ignore[arg-type]
        self.input_tokens.append(num_tokens)
        if layout.blocks_key:
            self._add_blocks(hashes, num_tokens)
        self.block_offsets.append(len(self.block_ids))

    def _add_blocks(self, hashes: object, num_tokens: int) -> None:
        field, block_tokens = self.layout.blocks_key, self.layout.block_tokens
        if not isinstance(hashes, list):
            raise self.fail(f"{field} is {shown_value(hashes)}; accepted: a list of block ids")
        most = -(-num_tokens // block_tokens)
        least = most if self.layout.names_partial_block else num_tokens // block_tokens
        if len(hashes) < least:
            raise self.fail(
                f"{field} has {len(hashes)} blocks of {block_tokens} tokens for {self.layout.input_key} {num_tokens}; "
                f"accepted: at least {least}"
            )
        if len(hashes) > most:
            self.num_overlong += 1
            hashes = hashes[:most]
        try:
            self._add_ids(hashes)
        except (TypeError, OverflowError):
            raise self.fail(
                f"{field} is {shown_value(hashes)}; accepted: 64-bit whole numbers only, or strings only, in all lines"
            ) from None

    def _add_ids(self, hashes: list[Any]) -> None:
        """Whole numbers as they are (those of 64 unsigned bits wrap round, so they stay apart), strings numbered."""
        if hashes and isinstance(hashes[0], str):
            if len(self.block_ids) > 0 and not self.id_of_hash:
                raise TypeError
            if not all(isinstance(value, str) for value in hashes):
                raise TypeError
            ids = self.id_of_hash
            self.block_ids.extend([ids.setdefault(value, len(ids)) for value in hashes])
            return
        if hashes and self.id_of_hash:
            raise TypeError
        start = len(self.block_ids)
        try:
            self.block_ids.extend(hashes)
        except OverflowError:
            del self.block_ids[start:]
            self.block_ids.extend([value - (1 << 64) if (1 << 63) <= value < (1 << 64) else value for value in hashes])

    def trace(self, name: str) -> Trace:
        """The trace of all that was added, in order of arrival."""
        if not self.stamps:
            raise TraceError(f"trace {self.shown!r} is empty; accepted: at least one request")
        stamps = np.array(self.stamps)
        block_ids, block_offsets = np.array(self.block_ids), np.array(self.block_offsets)
        input_tokens, output_tokens = np.array(self.input_tokens), np.array(self.output_tokens)
        warnings = []
        n = len(stamps)
        if num_late := int((stamps < np.maximum.accumulate(stamps)).sum()):
            warnings.append(f"{num_late:,} of {n:,} timestamps were out of order; sorted")
            order = np.argsort(stamps, kind="stable")
            block_ids, block_offsets = _reordered(block_ids, block_offsets, order)
            stamps, input_tokens, output_tokens = stamps[order], input_tokens[order], output_tokens[order]
        if self.num_overlong:
            warnings.append(
                f"{self.num_overlong:,} of {n:,} requests had more block ids than their input fills; the rest ignored"
            )
        block_ids = numbered_by_appearance(block_ids)
        if num_loose := num_unchained(block_ids, block_offsets):
            warnings.append(
                f"{num_loose:,} of {len(block_ids):,} block ids stood after different blocks; renamed to name prefixes"
            )
            block_ids = _chained(block_ids, block_offsets)
        return Trace(
            name=self.name or name,
            block_tokens=self.layout.block_tokens,
            has_block_ids=self.layout.blocks_key is not None,
            arrival_s=(stamps - stamps[0]) / self.layout.stamps_per_s,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            block_ids=block_ids,
            block_offsets=block_offsets,
            synthesised=self.synthesised,
            warnings=tuple(warnings),
        )


def _reordered(block_ids: IntArray, block_offsets: IntArray, order: IntArray) -> tuple[IntArray, IntArray]:
    """The blocks of all requests with the requests in another order."""
    num_blocks = np.diff(block_offsets)[order]
    offsets = np.concatenate(([0], np.cumsum(num_blocks)))
    within = np.arange(len(block_ids)) - np.repeat(offsets[:-1], num_blocks)
    return block_ids[np.repeat(block_offsets[:-1][order], num_blocks) + within], offsets


def _chained(block_ids: IntArray, block_offsets: IntArray) -> IntArray:
    """Ids renamed by (id of the block before, own id), so that equal ids mean equal prefixes."""
    renamed: dict[tuple[int, int], int] = {}
    chained = array("q")
    for start, end in zip(block_offsets[:-1].tolist(), block_offsets[1:].tolist(), strict=True):
        parent = -1
        for block_id in block_ids[start:end].tolist():
            parent = renamed.setdefault((parent, block_id), len(renamed))
            chained.append(parent)
    return np.array(chained)
