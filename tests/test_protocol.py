# SPDX-License-Identifier: Apache-2.0
"""The wire protocol: golden bytes for every verb, round trips, refusals, and PROTOCOL.md against the code."""

from __future__ import annotations

import re
import types
import typing
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgpack
import msgspec
import pytest
from hypothesis import given, settings

from mii_zmq import protocol, protocol_messages
from mii_zmq.errors import InvalidRequest, MiiError, ProtocolError, RequestTooLarge
from mii_zmq.protocol import (
    NO_ID,
    TAG,
    Abort,
    Aborted,
    BrokerHeartbeat,
    Cancel,
    Credit,
    Disconnect,
    ErrorHeader,
    FinalBody,
    FinalHeader,
    GenerateBody,
    GenerateHeader,
    Hello,
    Load,
    Message,
    PrefixCacheReset,
    Ready,
    Registered,
    ResetPrefixCache,
    TokenDelta,
    TokenRow,
    TokenRows,
    Verb,
    Welcome,
    WorkerHeartbeat,
    decode,
    encode,
    iterate_tokens,
    pack,
    parse_body,
    parse_header,
)

ID = bytes(range(16))
EPOCH = b"e" * 16
PAGE = Path(__file__).parent.parent / "PROTOCOL.md"


def one_row() -> list[bytes]:
    rows = TokenRows()
    rows.add(TokenDelta(ID, 0, 0, (9906).to_bytes(4, "little"), "Hé".encode(), None))
    return rows.to_frames()


def measured_rows() -> list[bytes]:
    rows = TokenRows()
    rows.add(TokenDelta(ID, 0, 0, bytes(4), b"a", None))
    rows.add(TokenDelta(EPOCH, 0, 0, bytes(4), b"b", None, b"\0\0"))
    return rows.to_frames()


def two_rows() -> list[bytes]:
    rows = TokenRows()
    rows.add(TokenDelta(ID, 3, 3, b"\1\0\0\0\2\0\0\0", b"ab", None))
    rows.add(TokenDelta(EPOCH, 0, 0, b"", b"", "stop"))
    return rows.to_frames(client=7)


GOLDEN: dict[str, tuple[list[bytes], tuple[str, ...]]] = {
    "HELLO": (
        encode(Verb.HELLO, header=Hello(name="n", batch=True)),
        ("01", "0" * 32, "82a46e616d65a16ea56261746368c3", "80"),
    ),
    "WELCOME": (
        encode(
            Verb.WELCOME,
            header=Welcome(
                epoch=EPOCH, heartbeat_ms=500, liveness=6, max_body_bytes=8, deployments=["m"], capabilities=["batch"]
            ),
        ),
        (
            "02",
            "0" * 32,
            "86a565706f6368c41065656565656565656565656565656565ac6865617274626561745f6d73cd01f4a86c6976656e65737306"
            "ae6d61785f626f64795f627974657308ab6465706c6f796d656e747391a16dac6361706162696c697469657391a56261746368",
            "80",
        ),
    ),
    "GENERATE": (
        encode(
            Verb.GENERATE,
            ID,
            GenerateHeader(deployment="m", stream=True),
            GenerateBody(prompt="Hi", params={"n": 1}),
            (bytes(4),),
        ),
        (
            "10",
            ID.hex(),
            "82aa6465706c6f796d656e74a16da673747265616dc3",
            "82a670726f6d7074a24869a6706172616d7381a16e01",
            "00" * 4,
        ),
    ),
    "ACCEPTED": (encode(Verb.ACCEPTED, ID), ("11", ID.hex(), "80", "80")),
    "TOKENS": (one_row(), ("12", ID.hex(), f"81a4726f77739196c410{ID.hex()}00000103c0", "80", "b2260000", "48c3a9")),
    "TOKENS of several": (
        two_rows(),
        (
            "12",
            "0" * 32,
            f"82a4726f77739296c410{ID.hex()}03030202c096c410{EPOCH.hex()}00000000a473746f70a6636c69656e7407",
            "80",
            "0100000002000000",
            "6162",
        ),
    ),
    "TOKENS with log-probabilities": (
        measured_rows(),
        (
            "12",
            "0" * 32,
            f"82a4726f77739296c410{ID.hex()}00000101c096c410{EPOCH.hex()}00000101c0ad6c6f6770726f625f6279746573920002",
            "80",
            "00" * 8,
            "6162",
            "0000",
        ),
    ),
    "FINAL": (
        encode(
            Verb.FINAL,
            ID,
            FinalHeader(finish_reason="stop"),
            FinalBody(finish_reason="stop", prompt_length=2, generated_length=1),
        ),
        (
            "13",
            ID.hex(),
            "81ad66696e6973685f726561736f6ea473746f70",
            "83ad66696e6973685f726561736f6ea473746f70ad70726f6d70745f6c656e67746802b067656e6572617465645f6c656e67746801",
        ),
    ),
    "ERROR": (
        encode(Verb.ERROR, ID, ErrorHeader(code="overloaded", message="m", retryable=True, retry_after_ms=100)),
        (
            "14",
            ID.hex(),
            "84a4636f6465aa6f7665726c6f61646564a76d657373616765a16da9726574727961626c65c3ae72657472795f61667465725f6d7364",
            "80",
        ),
    ),
    "CANCEL": (
        encode(Verb.CANCEL, header=Cancel(request_ids=[ID])),
        ("15", "0" * 32, f"81ab726571756573745f69647391c410{ID.hex()}", "80"),
    ),
    "CREDIT": (encode(Verb.CREDIT, ID, Credit(credit=16)), ("16", ID.hex(), "81a663726564697410", "80")),
    "STATUS": (
        encode(Verb.STATUS, ID, None, {"num_clients": 1}),
        ("17", ID.hex(), "80", "81ab6e756d5f636c69656e747301"),
    ),
    "HEARTBEAT": (
        encode(Verb.HEARTBEAT, header=BrokerHeartbeat(epoch=EPOCH)),
        ("18", "0" * 32, f"81a565706f6368c410{EPOCH.hex()}", "80"),
    ),
    "HEARTBEAT of a worker": (
        encode(Verb.HEARTBEAT, header=WorkerHeartbeat(incarnation=ID, state="ready", load=Load(step=5, step_ms=1.5))),
        (
            "18",
            "0" * 32,
            f"83ab696e6361726e6174696f6ec410{ID.hex()}a57374617465a57265616479a46c6f616482a47374657005a7737465705f6d73cb3ff8000000000000",
            "80",
        ),
    ),
    "READY": (
        encode(Verb.READY, header=Ready(group="g", incarnation=ID, deployment="m", max_requests=4, max_model_len=9)),
        (
            "20",
            "0" * 32,
            f"85a567726f7570a167ab696e6361726e6174696f6ec410{ID.hex()}aa6465706c6f796d656e74a16dac6d61785f726571756573747304"
            "ad6d61785f6d6f64656c5f6c656e09",
            "80",
        ),
    ),
    "REGISTERED": (
        encode(Verb.REGISTERED, header=Registered(epoch=EPOCH, heartbeat_ms=500, liveness=6)),
        ("21", "0" * 32, f"83a565706f6368c410{EPOCH.hex()}ac6865617274626561745f6d73cd01f4a86c6976656e65737306", "80"),
    ),
    "ABORT": (
        encode(Verb.ABORT, ID, Abort(tenant="t", names=["n"])),
        ("19", ID.hex(), "82a674656e616e74a174a56e616d657391a16e", "80"),
    ),
    "ABORT answered": (
        encode(Verb.ABORT, ID, Aborted(num_requests=1, request_ids=[EPOCH])),
        ("19", ID.hex(), f"82ac6e756d5f726571756573747301ab726571756573745f69647391c410{EPOCH.hex()}", "80"),
    ),
    "RESET_PREFIX_CACHE": (
        encode(Verb.RESET_PREFIX_CACHE, ID, ResetPrefixCache(deployment="m")),
        ("1a", ID.hex(), "81aa6465706c6f796d656e74a16d", "80"),
    ),
    "RESET_PREFIX_CACHE answered": (
        encode(Verb.RESET_PREFIX_CACHE, ID, PrefixCacheReset(done=["g"], failed={"h": "x"})),
        ("1a", ID.hex(), "82a4646f6e6591a167a66661696c656481a168a178", "80"),
    ),
    "DRAIN": (encode(Verb.DRAIN), ("22", "0" * 32, "80", "80")),
    "DISCONNECT": (
        encode(Verb.DISCONNECT, header=Disconnect(reason="x")),
        ("23", "0" * 32, "81a6726561736f6ea178", "80"),
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name: str) -> None:
    frames, expected = GOLDEN[name]
    assert [frame.hex() for frame in frames] == ["4d49495a0101", *expected]
    message = decode(frames)
    assert message.to_frames() == frames
    assert message.verb.name == name.split()[0]


def test_every_verb_has_golden_bytes() -> None:
    assert {name.split()[0] for name in GOLDEN} == {verb.name for verb in Verb}


# Round trips.

texts = st.text(st.characters(codec="utf-8"), max_size=20)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | texts
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
maps = st.dictionaries(texts, values, max_size=4)


@pytest.mark.slow
@given(verb=st.sampled_from(Verb), header=maps, body=maps, raw=st.lists(st.binary(max_size=20), max_size=3))
@settings(max_examples=50, deadline=None)
def test_any_message_comes_back(verb: Verb, header: dict[str, Any], body: dict[str, Any], raw: list[bytes]) -> None:
    message = decode(encode(verb, ID, header, body, raw))
    assert message == Message(verb, ID, header, pack(body), raw)
    assert protocol.unpack_map(message.body, "body") == body


deltas = st.builds(
    TokenDelta,
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**31),
    st.integers(0, 2**31),
    st.lists(st.binary(min_size=4, max_size=4), max_size=4).map(b"".join),
    texts.map(str.encode),
    st.none() | st.sampled_from(("stop", "length")),
    st.just(b"") | st.binary(max_size=9),
    st.just(0) | st.integers(0, 2**31),
)


@pytest.mark.slow
@given(rows=st.lists(deltas, min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_rows_come_back(rows: list[TokenDelta]) -> None:
    builder = TokenRows()
    for row in rows:
        builder.add(row)
    message = decode(builder.to_frames())
    assert list(iterate_tokens(message)) == rows
    assert message.request_id == (rows[0].request_id if len(rows) == 1 else NO_ID)


# Refusals.


@given(frames=st.lists(st.binary(max_size=24), max_size=8))
@settings(max_examples=100, deadline=None)
def test_noise_is_refused_in_order(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode(frames)


@pytest.mark.slow
@given(name=st.sampled_from(list(GOLDEN)), at=st.integers(0, 400), value=st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_a_changed_byte_is_read_or_refused(name: str, at: int, value: int) -> None:
    frames = list(GOLDEN[name][0])
    index = at % len(frames)
    frame = bytearray(frames[index])
    if frame:
        frame[at % len(frame)] = value
    frames[index] = bytes(frame)
    try:
        message = decode(frames)
        list(iterate_tokens(message))
    except MiiError:
        pass


@pytest.mark.slow
@given(
    rows=st.lists(st.lists(values, min_size=5, max_size=8) | values, max_size=3),
    raw=st.lists(st.binary(max_size=9), max_size=4),
)
@settings(max_examples=100, deadline=None)
def test_rows_that_make_no_sense_are_refused(rows: list[Any], raw: list[bytes]) -> None:
    try:
        assert all(
            len(delta.token_ids) % 4 == 0 for delta in iterate_tokens(Message(Verb.TOKENS, ID, {"rows": rows}, raw=raw))
        )
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    "row",
    [
        [ID, 0, 0, 2, 0, None],
        [ID, 0, 0, 1, 9, None],
        [ID, 0, 0, -1, 0, None],
        [ID, 0, 0, 1.0, 0, None],
        ["id", 0, 0, 1, 0, None],
        [ID, "0", 0, 1, 0, None],
        [ID, 0, None, 1, 0, None],
        [ID, 0, 0, 1, 0, 5],
        [ID, 0, 0, 1, 0],
        7,
        [ID, 0, 0, True, 0, None],
        [ID, 0, 0, 1, 0, None, 1],
    ],
)
def test_bad_row(row: Any) -> None:
    with pytest.raises(ProtocolError):
        list(iterate_tokens(Message(Verb.TOKENS, ID, {"rows": [row]}, raw=(bytes(4), b""))))


@pytest.mark.parametrize("sizes", [[1], [1, 2], [-1, 4], [1.0, 1], [4, 0], ["1", 0], 2])
def test_sizes_of_log_probabilities_that_do_not_add_up(sizes: Any) -> None:
    header = {"rows": [[ID, 0, 0, 1, 0, None], [EPOCH, 0, 0, 1, 0, None]], "logprob_bytes": sizes}
    with pytest.raises(ProtocolError):
        list(iterate_tokens(Message(Verb.TOKENS, ID, header, raw=(bytes(8), b"", b"ab"))))


@pytest.mark.parametrize("lengths", [[1], [1, 2, 3], [-1, 4], [1.0, 1], ["1", 0], 2])
def test_prompt_lengths_that_do_not_belong_to_the_rows(lengths: Any) -> None:
    header = {"rows": [[ID, 0, 0, 1, 0, None], [EPOCH, 0, 0, 1, 0, None]], "prompt_lengths": lengths}
    with pytest.raises(ProtocolError):
        list(iterate_tokens(Message(Verb.TOKENS, ID, header, raw=(bytes(8), b""))))


def replaced(index: int, frame: bytes) -> list[bytes]:
    frames = encode(Verb.GENERATE, ID, {"deployment": "m"})
    frames[index] = frame
    return frames


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([], "5 to 16 frames, this one has 0"),
        (encode(Verb.STATUS, raw=[b""] * 12), "this one has 17"),
        (replaced(0, b"HTTP/1"), "protocol tag"),
        (replaced(0, b"MIIZ"), "protocol tag"),
        (replaced(0, b"MIIZ\x02\x00"), "version 2.0 is not supported; supported: 1.x"),
        (replaced(1, b"\x7f"), "unknown verb 0x7f"),
        (replaced(1, b"\x10\x10"), "unknown verb"),
        (replaced(2, b"short"), "this one has 5"),
        (replaced(3, b""), "not valid msgpack"),
        (replaced(3, b"\x90"), "must be a msgpack map"),
        (replaced(3, b"\x81\x01\x01"), "msgpack"),
        (replaced(3, b"\x80\x80"), "not valid msgpack"),
        (replaced(3, b"\x91" * 100_000), "msgpack"),
        (replaced(3, b"\x81\xa1x\xa2\xed\xa0"), "not valid msgpack"),
    ],
)
def test_refused_frames(frames: list[bytes], words: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(words)):
        decode(frames)


@pytest.mark.parametrize("value", [msgpack.ExtType(5, b"x"), msgpack.Timestamp(1), msgpack.ExtType(5, b"")])
def test_extension_types_are_refused(value: Any) -> None:
    data = msgpack.packb({"x": value})
    with pytest.raises(ProtocolError):
        decode(replaced(3, data))
    with pytest.raises(ProtocolError):
        parse_body(Message(Verb.GENERATE, ID, body=data), GenerateBody)


@pytest.mark.parametrize(
    "frames",
    [
        replaced(3, bytes(protocol.MAX_HEADER_BYTES + 1)),
        replaced(4, bytes(protocol.MAX_BODY_BYTES + 1)),
        [*replaced(4, b"\x80"), bytes(protocol.MAX_RAW_BYTES), b"x"],
    ],
)
def test_oversized_parts_are_refused_undecoded(frames: list[bytes]) -> None:
    with pytest.raises(RequestTooLarge, match=r"limit|exceed"):
        decode(frames)


def test_minor_versions_and_unknown_header_keys_pass() -> None:
    frames = encode(Verb.GENERATE, ID, {"deployment": "m", "colour": "red"})
    frames[0] = TAG[:5] + b"\x09"
    message = decode(frames)
    assert parse_header(message, GenerateHeader).deployment == "m"
    assert message.header["colour"] == "red"


def test_header_faults_name_the_field() -> None:
    with pytest.raises(ProtocolError, match="GENERATE header") as caught:
        parse_header(Message(Verb.GENERATE, ID, {"deployment": "m", "deadline_ms": "soon"}), GenerateHeader)
    assert caught.value.param == "deadline_ms"


def test_faults_of_the_encoding_name_the_field_too() -> None:
    for value in ({"a": [msgpack.ExtType(5, b"x")]}, {"a": {1: 2}}):
        data = msgpack.packb({"fine": 1, "params": value, "later": 2})
        with pytest.raises(ProtocolError, match="field 'params' of the body is not valid msgpack") as caught:
            protocol.unpack_map(data, "body")
        assert caught.value.param == "params"
    with pytest.raises(ProtocolError, match="^the body is not valid msgpack") as caught:
        protocol.unpack_map(b"\xc1", "body")
    assert caught.value.param is None


def test_body_faults_name_the_field() -> None:
    with pytest.raises(InvalidRequest, match="promt"):
        parse_body(Message(Verb.GENERATE, ID, body=pack({"promt": "x"})), GenerateBody)
    with pytest.raises(InvalidRequest) as caught:
        parse_body(Message(Verb.GENERATE, ID, body=pack({"prompt_token_ids": [1, "2"]})), GenerateBody)
    assert caught.value.param == "prompt_token_ids"


# PROTOCOL.md.


def tables(title: str) -> list[list[str]]:
    """The rows of the first table below a heading, header and ruler left out."""
    text = PAGE.read_text()
    start = re.search(rf"^#+ {re.escape(title)}$", text, re.MULTILINE)
    assert start is not None, f"PROTOCOL.md has no heading {title!r}"
    rows: list[list[str]] = []
    for line in text[start.end() :].splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif rows or line.startswith("#"):
            break
    return rows[2:]


def schemas() -> dict[str, type[msgspec.Struct]]:
    found = {
        name: value
        for name, value in vars(protocol_messages).items()
        if isinstance(value, type) and issubclass(value, msgspec.Struct)
    }
    return {name: value for name, value in found.items() if name != "Header"}


def wire_type(kind: Any) -> str:
    names = {str: "str", bytes: "bin", int: "int", float: "float", bool: "bool", Load: "map (Load)"}
    if kind in names:
        return names[kind]
    arms = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return f"{wire_type(arms[0])} or nil"
    if typing.get_origin(kind) is typing.Literal:
        return wire_type(type(arms[0]))
    if typing.get_origin(kind) is list:
        return f"[{wire_type(arms[0])}]"
    assert typing.get_origin(kind) is dict
    return "map"


def wire_default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    words = {None: "nil", True: "true", False: "false"}
    if isinstance(value, str):
        shown = f'"{value}"'
    else:
        shown = words[value] if value is None or isinstance(value, bool) else str(value).removesuffix(".0")
    return f"`{shown}`"


@pytest.mark.parametrize("name", sorted(schemas()))
def test_page_describes_every_schema(name: str) -> None:
    fields = msgspec.structs.fields(schemas()[name])
    documented = [(row[0], row[1], row[3]) for row in tables(name)]
    assert documented == [(field.name, wire_type(field.type), wire_default(field)) for field in fields]


def test_page_lists_every_verb() -> None:
    rows = tables("Verbs")
    assert [(row[0], row[1]) for row in rows] == [(verb.name, f"0x{verb:02x}") for verb in Verb]
    mentioned = set(re.findall(r"[A-Z][a-z]+(?:[A-Z][a-z]+)*", " ".join(row[3] + " " + row[4] for row in rows)))
    assert mentioned | {"Load", "HistogramValues"} == set(schemas())


def test_page_lists_every_row_field_and_limit() -> None:
    assert [row[1] for row in tables("TOKENS")] == list(TokenRow._fields)
    limits = " ".join(row[2] + row[1] for row in tables("Frames"))
    for value in (protocol.MAX_HEADER_BYTES, protocol.MAX_BODY_BYTES, protocol.MAX_RAW_BYTES):
        assert f"at most {value // 2**20} MiB" in limits
    assert f"{protocol.MAX_FRAMES} frames" in limits


def test_page_lists_codes_that_exist() -> None:
    from mii_zmq.errors import from_wire

    text = PAGE.read_text()
    table = text[text.index("| code | from | meaning |") :].split("\n\n")[0]
    codes = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert len(codes) == len(set(codes)) == 16
    assert [from_wire({"code": code}).code for code in codes] == codes


def test_page_examples_are_the_bytes() -> None:
    blocks = re.findall(r"```hex\n(.*?)```", PAGE.read_text(), re.DOTALL)
    examples = [bytes.fromhex("".join(re.split(r" {3,}", line)[0] for line in block.splitlines())) for block in blocks]
    generate = encode(
        Verb.GENERATE, ID, {"deployment": "m", "stream": True}, {"prompt": "Hi", "params": {"max_new_tokens": 4}}
    )
    assert examples == [b"".join(generate), b"".join(one_row())]
