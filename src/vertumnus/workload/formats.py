"""The trace formats that are understood, as data: how each names its fields and how a first line gives it away."""

from collections.abc import Mapping
from dataclasses import dataclass

OWN_SCHEMA = "vertumnus-trace"
OWN_VERSION = 1
SYNTHESISED_KEY = "synthesised"
"""Extra field in the first line of a generated Mooncake file; its value is the name of the trace."""

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the fields of a request are called and what they mean.

    `stamps_per_s` is the unit of `time_key`. With `names_partial_block` a last, partly filled block has an id too;
    without, it may have one. `blocks_key` is None where there is no prefix information.
    """

    name: str
    marks: frozenset[str]
    time_key: str
    stamps_per_s: float
    input_key: str
    output_key: str
    blocks_key: str | None
    block_tokens: int
    names_partial_block: bool


MOONCAKE = Layout(
    name="Mooncake",
    marks=frozenset({"timestamp", "input_length", "output_length", "hash_ids"}),
    time_key="timestamp",
    stamps_per_s=1000,
    input_key="input_length",
    output_key="output_length",
    blocks_key="hash_ids",
    block_tokens=MOONCAKE_BLOCK_TOKENS,
    names_partial_block=True,
)
BAILIAN = Layout(
    name="Bailian",
    marks=MOONCAKE.marks | {"chat_id"},
    time_key="timestamp",
    stamps_per_s=1,
    input_key="input_length",
    output_key="output_length",
    blocks_key="hash_ids",
    block_tokens=16,
    names_partial_block=False,
)
RTP_LLM = Layout(
    name="RTP-LLM",
    marks=frozenset({"ts", "il", "ol", "bh"}),
    time_key="ts",
    stamps_per_s=1000,
    input_key="il",
    output_key="ol",
    blocks_key="bh",
    block_tokens=1024,
    names_partial_block=False,
)

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
AZURE = Layout(
    name="Azure",
    marks=frozenset(),
    time_key=AZURE_COLUMNS[0],
    stamps_per_s=1,
    input_key=AZURE_COLUMNS[1],
    output_key=AZURE_COLUMNS[2],
    blocks_key=None,
    block_tokens=MOONCAKE_BLOCK_TOKENS,
    names_partial_block=False,
)

ACCEPTED = (
    "Mooncake JSONL (timestamp, input_length, output_length, hash_ids), Bailian JSONL (the same with chat_id), "
    "RTP-LLM JSONL (ts, il, ol, bh), Azure CSV (TIMESTAMP,ContextTokens,GeneratedTokens) or our own JSONL "
    f'(first line {{"schema": "{OWN_SCHEMA}", ...}}), each plain, gzip or zstd'
)


def recognised(first_object: Mapping[str, object]) -> Layout | None:
    """The layout whose fields a first JSON object has; the one with most marks if several fit."""
    fitting = [layout for layout in (BAILIAN, RTP_LLM, MOONCAKE) if layout.marks <= first_object.keys()]
    return fitting[0] if fitting else None


def own_layout(block_tokens: int, has_block_ids: bool) -> Layout:
    """Our own rows, as announced by their header line."""
    return Layout(
        name="Vertumnus",
        marks=frozenset(),
        time_key="arrival_s",
        stamps_per_s=1,
        input_key="input_tokens",
        output_key="output_tokens",
        blocks_key="block_ids" if has_block_ids else None,
        block_tokens=block_tokens,
        names_partial_block=False,
    )
