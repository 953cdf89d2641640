import contextlib
import socket
import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vertumnus.engine.errors import WireError
from vertumnus.engine.geometry import GroupKey
from vertumnus.engine.messages import (
    Activate,
    CopySource,
    Done,
    FormGroups,
    Hello,
    Lease,
    MemoryHandle,
    Message,
    Pull,
    Refusal,
    RefusalReason,
    RunStep,
    Stepped,
    decode,
    encode,
)
from vertumnus.engine.step import (
    PrefixPath,
    RequestOutput,
    Sampling,
    Step,
    StepOutput,
    StepRequest,
    StepTimings,
)
from vertumnus.engine.wire import MAX_FRAME_BYTES, Connection, listener_at

int32s = st.integers(-(2**31), 2**31 - 1)
counts = st.integers(0, 2**63 - 1)
seconds = st.floats(0, 1e6)
rows = st.lists(int32s, max_size=5).map(tuple)
addresses = st.lists(st.tuples(st.integers(0, 63), counts), max_size=4).map(tuple)
samplings = st.builds(
    Sampling, temperature=seconds, top_k=st.none() | st.integers(1, 99), top_p=st.floats(0.1, 1), seed=counts
)
requests = st.builds(
    StepRequest,
    request_id=counts,
    token_ids=rows,
    num_prefix_tokens=counts,
    blocks=addresses,
    sampling=st.none() | samplings,
    labels=st.lists(st.binary(max_size=17), max_size=3).map(tuple),
    num_top_logprobs=st.none() | st.integers(0, 20),
    has_all_logits=st.booleans(),
    prefix_path=st.sampled_from(PrefixPath),
)
steps = st.builds(
    Step,
    step_id=counts,
    first_rank=counts,
    degree=counts,
    epoch=counts,
    requests=st.lists(requests, max_size=3).map(tuple),
)
timings = st.builds(
    StepTimings,
    total_s=seconds,
    gather_s=seconds,
    attention_s=seconds,
    mlp_s=seconds,
    projection_s=seconds,
    wait_s=seconds,
)
outputs = st.builds(
    StepOutput,
    step_id=counts,
    rank=counts,
    epoch=counts,
    outputs=st.lists(
        st.builds(
            RequestOutput,
            request_id=counts,
            token_id=counts,
            logprob=st.none() | st.floats(-9, 0),
            top_logprobs=st.lists(st.tuples(counts, st.floats(-9, 0)), max_size=2).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
    timings=timings,
    received_bytes=counts,
    num_pass_q=counts,
    logits_of=addresses,
    logits=st.binary(max_size=16),
)
leases = st.builds(
    Lease,
    lease_id=counts,
    rank=counts,
    slots=rows,
    checksums=st.lists(st.binary(max_size=16), max_size=3).map(tuple),
    tags=st.lists(st.binary(max_size=32), max_size=3).map(tuple),
    block_bytes=counts,
    source=st.builds(
        CopySource,
        host=st.text(max_size=9),
        port=counts,
        memory=st.none() | st.builds(MemoryHandle, host_id=st.text(), pid=counts, fd=counts, inode=counts),
    ),
)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(RunStep, step=steps),
    st.builds(Stepped, output=outputs),
    st.builds(Pull, lease=leases, slots=rows, is_tcp=st.booleans()),
    st.builds(Activate, epoch=counts, first_rank=counts, degree=counts),
    st.builds(FormGroups, generation=counts, groups=st.lists(st.builds(GroupKey, counts, counts)).map(tuple)),
    st.builds(Refusal, rank=counts, reason=st.sampled_from(RefusalReason), detail=st.text(max_size=9)),
    st.just(Done()),
)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)


@given(counts, messages)
def test_a_message_comes_back_as_it_was(call_id, message):
    assert decode(encode(call_id, message)) == (call_id, message)


@given(st.binary(max_size=200))
def test_garbage_is_a_wire_error_and_nothing_else(body):
    with pytest.raises(WireError):
        decode(body)


@given(st.sampled_from(["Activate", "RunStep", "Pull", "Refusal", "FormGroups", "Done"]), plain)
def test_well_formed_msgpack_of_other_content_is_a_wire_error_or_a_message(name, fields):
    try:
        _, message = decode(msgpack.packb([1, name, fields]))
    except WireError:
        return
    assert type(message).__name__ == name


@given(messages, st.data())
def test_a_changed_byte_is_noticed_or_gives_another_message(message, data):
    body = bytearray(encode(7, message))
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        decode(bytes(body))


@pytest.mark.parametrize(
    ("envelope", "named"),
    [
        ([1, "Sing", {}], "Sing"),
        ([1, "Activate", {"epoch": 1, "first_rank": 0}], "other fields"),
        ([1, "Activate", {"epoch": 1, "first_rank": 0, "degree": 2, "more": 1}], "other fields"),
        ([1, "Activate", {"epoch": "1", "first_rank": 0, "degree": 2}], "Activate.epoch"),
        ([1, "Activate", {"epoch": True, "first_rank": 0, "degree": 2}], "Activate.epoch"),
        ([1, "FormGroups", {"generation": 1, "groups": [{"first_rank": 0}]}], r"groups\[0\]"),
        ([1, "ReleaseLease", {"lease_id": 1.5}], "lease_id"),
        ([-1, "Done", {}], "call_id"),
        ({"Done": 1}, "call_id"),
    ],
)
def test_what_is_wrong_is_named(envelope, named):
    with pytest.raises(WireError, match=named):
        decode(msgpack.packb(envelope))


def test_values_beyond_the_wire_are_refused_before_they_are_sent():
    with pytest.raises(WireError, match="Activate"):
        encode(1, Activate(epoch=2**64, first_rank=0, degree=1))
    request = StepRequest(request_id=1, token_ids=[2**31], num_prefix_tokens=0, blocks=[])
    with pytest.raises(WireError, match="RunStep"):
        encode(1, RunStep(step=Step(step_id=1, first_rank=0, degree=1, epoch=1, requests=[request])))


def test_a_frame_that_is_too_large_is_not_kept_and_the_next_one_is_read(monkeypatch):
    monkeypatch.setattr("vertumnus.engine.wire.MAX_FRAME_BYTES", 64)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(struct.pack(">I", 100) + bytes(100))
        Connection(ours).send(5, Done())
        receiver = Connection(theirs)
        with pytest.raises(WireError, match="at most 64"):
            receiver.receive()
        assert receiver.receive() == (5, Done())
        ours.close()
        with pytest.raises(EOFError):
            receiver.receive()


def test_a_message_larger_than_a_frame_is_not_sent():
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(WireError, match=str(MAX_FRAME_BYTES)):
        Connection(ours).send(
            1,
            Hello(
                token="x" * (MAX_FRAME_BYTES + 1),
                rank=0,
                incarnation=0,
                pid=1,
                num_slots=1,
                block_bytes=1,
                block_tokens=1,
            ),
        )


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_listening_is_over_the_family_of_the_address_and_over_ipv4_where_a_name_has_both():
    with listener_at("localhost", 0) as listener:
        assert listener.family == socket.AF_INET
    if has_ipv6():
        with listener_at("::1", 0) as listener:
            assert listener.family == socket.AF_INET6
    else:
        with pytest.raises(OSError, match=r"."):
            listener_at("::1", 0)
    with pytest.raises(OSError, match=r"."):
        listener_at("192.0.2.1", 0)
