"""Every accepted format, and every way in which a file can be bad."""

import contextlib
import gzip
import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from vertumnus.errors import ConfigError, TraceError
from vertumnus.workload.readers import read_trace

MOONCAKE = (
    '{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]}\n'
    '{"timestamp": 1500, "input_length": 1100, "output_length": 6, "hash_ids": [7, 9, 10]}\n'
)
BAILIAN = (
    '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 33, "output_length": 2, '
    '"type": "text", "turn": 1, "hash_ids": [100, 200, 300]}\n'
    '{"chat_id": 2, "parent_chat_id": 1, "timestamp": 62.5, "input_length": 40, "output_length": 2, '
    '"type": "text", "turn": 2, "hash_ids": [100, 200]}\n'
)
RTP_LLM = (
    '{"ts": 10, "il": 2050, "ol": 0, "bh": ["18446744073709551615", "a"], "priority": 70}\n'
    '{"ts": 30, "il": 1500, "ol": 3, "bh": ["18446744073709551615"], "priority": 30}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:03.9799601,3180,8\n"
    "2023-11-16 19:17:04.0319600+01:00,110,27\n"
)
OWN = (
    '{"schema": "vertumnus-trace", "version": 1, "name": "mine", "block_tokens": 16, "has_block_ids": true}\n'
    '{"arrival_s": 0.125, "input_tokens": 20, "output_tokens": 1, "block_ids": [4]}\n'
    '{"arrival_s": 0.25, "input_tokens": 20, "output_tokens": 1, "block_ids": [4, 5]}\n'
)


@pytest.fixture
def written(tmp_path):
    def write(content: str | bytes, name: str = "some.trace.jsonl"):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def test_mooncake(written):
    trace = read_trace(written(MOONCAKE))
    trace.check_invariants()
    assert (trace.name, trace.block_tokens, trace.has_block_ids) == ("some.trace", 512, True)
    assert trace.arrival_s.tolist() == [0, 1.5]
    assert trace.input_tokens.tolist() == [1000, 1100]
    assert trace.output_tokens.tolist() == [5, 6]
    assert [trace.blocks(index).tolist() for index in range(2)] == [[0, 1], [0, 2, 3]]
    assert trace.full_blocks(0).tolist() == [0]
    assert not trace.synthesised


def test_bailian_has_small_blocks_and_stamps_in_seconds(written):
    trace = read_trace(written(BAILIAN))
    assert trace.block_tokens == 16
    assert trace.arrival_s[1] == pytest.approx(1.386)
    assert [trace.blocks(index).tolist() for index in range(2)] == [[0, 1, 2], [0, 1]]


def test_rtp_llm_hashes_are_strings_of_full_blocks(written):
    trace = read_trace(written(RTP_LLM))
    assert trace.block_tokens == 1024
    assert trace.arrival_s.tolist() == [0, 0.02]
    assert [trace.blocks(index).tolist() for index in range(2)] == [[0, 1], [0]]


def test_azure_keeps_100_ns_and_has_no_prefixes(written):
    trace = read_trace(written(AZURE, "azure.csv"))
    trace.check_invariants()
    assert (trace.name, trace.has_block_ids, len(trace.block_ids)) == ("azure", False, 0)
    assert trace.arrival_s[1] == pytest.approx(1e-7, rel=1e-3)
    assert trace.arrival_s[2] == pytest.approx(0.052)
    assert trace.output_tokens.tolist() == [10, 8, 27]
    assert trace.blocks(0).tolist() == []


def test_own_schema(written):
    trace = read_trace(written(OWN))
    assert (trace.name, trace.block_tokens) == ("mine", 16)
    assert trace.arrival_s.tolist() == [0, 0.125]
    assert [trace.blocks(index).tolist() for index in range(2)] == [[0], [0, 1]]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress, lambda data: b"\xef\xbb\xbf" + data])
@pytest.mark.parametrize("content", [MOONCAKE, BAILIAN, RTP_LLM, AZURE, OWN])
def test_compression_is_recognised_by_content(written, pack, content):
    plain, packed = read_trace(written(content, "plain")), read_trace(written(pack(content.encode()), "packed"))
    assert packed.input_tokens.tolist() == plain.input_tokens.tolist()
    assert packed.block_ids.tolist() == plain.block_ids.tolist()


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_standard_input_is_read_and_left_open(monkeypatch, pack):
    stdin = io.TextIOWrapper(io.BytesIO(pack(MOONCAKE.encode())))
    monkeypatch.setattr(sys, "stdin", stdin)
    trace = read_trace("-")
    assert (trace.name, trace.num_requests) == ("stdin", 2)
    assert not stdin.buffer.closed


def test_blank_lines_and_unknown_fields_do_no_harm(written):
    content = "\n" + MOONCAKE.replace('"timestamp"', '"note": "x", "timestamp"').replace("}\n", "}\r\n\n")
    assert read_trace(written(content)).num_requests == 2


def test_limit_stops_reading(written):
    assert read_trace(written(MOONCAKE + "rubbish"), limit=2).num_requests == 2
    with pytest.raises(ConfigError, match="limit is 0; accepted"):
        read_trace(written(MOONCAKE), limit=0)


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=40))
def test_arrivals_out_of_order_are_sorted_and_counted(tmp_path_factory, stamps):
    path = tmp_path_factory.mktemp("unsorted") / "trace.jsonl"
    rows = [
        {"timestamp": stamp, "input_length": index + 1, "output_length": index, "hash_ids": [index]}
        for index, stamp in enumerate(stamps)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = read_trace(path, spread=False)
    trace.check_invariants()
    order = sorted(range(len(stamps)), key=lambda index: stamps[index])
    assert trace.output_tokens.tolist() == order
    assert trace.arrival_s.tolist() == [(stamps[index] - min(stamps)) / 1000 for index in order]
    num_late = sum(stamp < max(stamps[: index + 1]) for index, stamp in enumerate(stamps))
    expected = (f"{num_late} of {len(stamps)} timestamps were out of order; sorted",) if num_late else ()
    assert trace.warnings == expected


def test_coarse_stamps_are_spread_by_default(written):
    rows = "".join(
        f'{{"timestamp": {3000 * (index // 10)}, "input_length": 1, "output_length": 1, "hash_ids": [{index}]}}\n'
        for index in range(300)
    )
    path = written(rows)
    spread, kept = read_trace(path, seed=1), read_trace(path, spread=False)
    assert len(np.unique(kept.arrival_s)) == 30
    assert len(np.unique(spread.arrival_s)) == 300
    assert spread.arrival_s.tolist() == read_trace(path, seed=1).arrival_s.tolist()
    assert spread.arrival_s.tolist() != read_trace(path, seed=2).arrival_s.tolist()
    assert spread.block_ids.tolist() == kept.block_ids.tolist()


def test_ids_that_do_not_name_prefixes_are_renamed_until_they_do(written):
    content = MOONCAKE.replace("[7, 9, 10]", "[9, 8, 8]")
    trace = read_trace(written(content))
    trace.check_invariants()
    assert [trace.blocks(index).tolist() for index in range(2)] == [[0, 1], [2, 3, 4]]
    assert "2 of 5 block ids stood after different blocks" in trace.warnings[0]


def test_ids_beyond_what_the_input_fills_are_dropped_and_counted(written):
    trace = read_trace(written(MOONCAKE.replace("[7, 8]", "[7, 8, 99]")))
    assert trace.blocks(0).tolist() == [0, 1]
    assert trace.warnings == ("1 of 2 requests had more block ids than their input fills; the rest ignored",)


def test_ids_of_64_unsigned_bits_stay_apart(written):
    trace = read_trace(written(MOONCAKE.replace("[7, 8]", f"[{2**64 - 1}, {2**63}]")))
    assert trace.block_ids.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty; accepted: at least one request"),
        ("\n \n", "is empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "is empty"),
        (OWN.splitlines()[0], "is empty"),
        ("hello\n", "line 1: the format is unknown .*Mooncake.*Bailian.*RTP-LLM.*Azure.*own JSONL"),
        ('{"a": 1}\n', "line 1: the format is unknown .*'a'"),
        ("a,b,c\n1,2,3\n", "format is unknown"),
        ("[1, 2]\n", "format is unknown"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "not UTF-8"),
        (b"\x1f\x8b\x08\x00broken", "damaged"),
        (gzip.compress(MOONCAKE.encode(), mtime=0)[:40], "damaged"),
        (b"\x28\xb5\x2f\xfdbroken!!!!", "damaged"),
        (MOONCAKE + '{"timestamp": 1\n', "line 3: .* is no JSON"),
        (MOONCAKE + "7\n", "line 3: the line is 7; accepted: one JSON object a line"),
        (MOONCAKE + '{"timestamp": 1}\n', "line 3: input_length is missing"),
        ('{"timestamp": ' + "[" * 100_000 + "\n", "line 1: .* is no JSON"),
        (MOONCAKE.replace("1100", "-1"), "line 2: input_length is -1; accepted: a whole number from 1 to 16777216"),
        (MOONCAKE.replace("1100", "0"), "input_length is 0"),
        (MOONCAKE.replace("1100", "1e3"), "input_length is 1000.0"),
        (MOONCAKE.replace("1100", "true"), "input_length is True"),
        (MOONCAKE.replace("1100", "99999999999"), "line 2: input_length is 99999999999; accepted"),
        (MOONCAKE.replace('"output_length": 6', '"output_length": -6'), "output_length is -6; accepted: .* 0 to"),
        (MOONCAKE.replace("1500", "null"), "timestamp is None"),
        (MOONCAKE.replace("1500", "NaN"), "timestamp is nan"),
        (MOONCAKE.replace("1500", "1e300"), "timestamp is 1e\\+300"),
        (MOONCAKE.replace("1500", "9" * 400), "timestamp is 9+\\.\\.\\.; accepted"),
        (MOONCAKE.replace("[7, 9, 10]", "[7, 9]"), "hash_ids has 2 blocks of 512 tokens .* 1100; accepted: at least 3"),
        (RTP_LLM.replace(', "a"]', "]"), "line 1: bh has 1 blocks of 1024 tokens .* at least 2"),
        (MOONCAKE.replace("[7, 9, 10]", '"abc"'), "hash_ids is 'abc'; accepted: a list"),
        (MOONCAKE.replace("[7, 9, 10]", "[7, 9, 1.5]"), "hash_ids is .*1.5.*; accepted: 64-bit whole numbers only"),
        (MOONCAKE.replace("[7, 9, 10]", '["7", "9", "10"]'), "line 2: hash_ids"),
        (MOONCAKE.replace("[7, 9, 10]", "[7, 9, null]"), "hash_ids"),
        (MOONCAKE.replace("[7, 9, 10]", f"[7, 9, {2**64}]"), "hash_ids"),
        (RTP_LLM.replace('["18446744073709551615"]', "[3]"), "line 2: bh"),
        (AZURE.replace("3180", "many"), "line 3: ContextTokens is 'many'"),
        (AZURE.replace("3180", "-5"), "line 3: ContextTokens is -5"),
        (AZURE.replace("3180,8", "3180"), "line 3: the line has 2 fields; accepted: 3"),
        (AZURE.replace("2023-11-16 18:17:03.9799601", "yesterday"), "line 3: TIMESTAMP is 'yesterday'"),
        (AZURE.replace("2023-11-16 18:17:03.9799601", "2023-13-16 18:17:03"), "line 3: TIMESTAMP"),
        (OWN.replace('"version": 1', '"version": 2'), "line 1: schema and version are .* 2; accepted"),
        (OWN.replace('"version": 1', '"version": 1, "colour": 3'), "unknown field 'colour'"),
        (OWN.replace('"block_tokens": 16', '"block_tokens": 0'), "block_tokens is 0"),
        (OWN.replace('"mine"', "7"), "name is 7"),
        (OWN.replace("true", '"yes"'), "has_block_ids"),
    ],
)
def test_bad_input_is_one_clear_sentence(written, content, message):
    path = written(content)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert caught.value.__cause__ is None


def test_a_file_that_is_not_there(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(TraceError, match="cannot be opened"):
            read_trace(path)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_trace_or_a_trace_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("bytes") / "some"
    path.write_bytes(content)
    with pytest.raises(TraceError):
        read_trace(path)


@given(st.data())
def test_a_damaged_file_gives_a_trace_or_a_trace_error(tmp_path_factory, data):
    content = bytearray(data.draw(st.sampled_from([MOONCAKE, BAILIAN, RTP_LLM, AZURE, OWN])).encode())
    if data.draw(st.booleans()):
        content = bytearray(gzip.compress(bytes(content), mtime=0))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "some"
    path.write_bytes(bytes(content))
    with contextlib.suppress(TraceError):
        read_trace(path).check_invariants()


def test_the_examples_of_the_documentation_are_read(written):
    page = (Path(__file__).parents[2] / "docs" / "traces.md").read_text()
    examples = re.findall(r"```(?:json|csv)\n(.*?)```", page, re.DOTALL)
    assert [read_trace(written(example)).block_tokens for example in examples] == [512, 16, 1024, 512, 1024]
