"""Every message of a driver and its workers: it arrives as it was sent, or it is refused."""

from __future__ import annotations

import json
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from edl_hvd.errors import ProtocolError
from edl_hvd.preflight.measured import Measured
from edl_hvd.preflight.messages import FROM_PROBE, TO_PROBE, Listening, Measure, Meet, Met
from edl_hvd.protocol import (
    FROM_WORKER,
    HELLO,
    TO_WORKER,
    Beat,
    CaughtUp,
    Done,
    DonorLost,
    Drain,
    Explain,
    Formed,
    Hello,
    Message,
    PeerLost,
    PreemptionNotice,
    Raised,
    Ready,
    ReceiveState,
    ResizeRequested,
    ServeState,
    ServingState,
    ShutDown,
    StragglerFound,
    Waits,
    WatchHello,
    WorldAssigned,
    decode,
    encode,
)
from edl_hvd.stage_times import StageTimes
from edl_hvd.teacher_counts import TeacherCounts
from edl_hvd.work_report import WorkReport

SIDES: list[Any] = [HELLO, FROM_WORKER, TO_WORKER, FROM_PROBE, TO_PROBE]
KNOWN = {word: kind for side in SIDES for word, kind in side.items()}
MESSAGES = [
    Hello("secret", "a:0", 1),
    WatchHello("secret", "a:0", 1),
    Ready(-1),
    CaughtUp(3),
    ServingState(3, "b:0", "10.0.0.1", 4711),
    Formed(3),
    Beat(
        1,
        77,
        41,
        656,
        40,
        "collective",
        0.25,
        3.0,
        9,
        41,
        41,
        0.5,
        "edl_hvd.gather",
        TeacherCounts(38, 1512.0, 11, 12, 0.004, StageTimes(0.001, 0.02, 0.003, 0.004, 0.1, 0.2, 0.0005)),
        work=WorkReport(64, 8, True, 6400, 0.5, (1, 2), (10.0, 19.0)),
    ),
    Raised(41, "ValueError: '…' \ud800", hopeless=True),
    Done(),
    Drain(),
    PreemptionNotice(120.0),
    Waits(1, 9, "edl_hvd.gather", (3, 0), "train.py:71 in augment", "  File …\n  File …"),
    WorldAssigned(3, ("a:0", "b:0"), "10.0.0.1", 4711, None, "10.0.0.2", 41),
    ResizeRequested(3),
    PeerLost(3, "b:0"),
    StragglerFound("b:0", 3, 41, 0.4, 0.1),
    ShutDown(save=True, left_s=None),
    ServeState(3, "b:0", None),
    ReceiveState(3, "10.0.0.1", 4711),
    DonorLost(),
    Explain(3, ("edl_hvd.gather", "edl_hvd.flags")),
    Measured("cpu", 1, 12.5, "broken"),
    Listening(1, 4711),
    Met(1, 0.25, ""),
    Measure(),
    Meet(1, "10.0.0.1", None, None, "eth0"),
]
# Put into every field; those that it may not have are refused.
VALUES = ["7", 7, 7.5, True, None, [], [7], ["7"], [None], {}, float("nan"), float("inf")]


def line(fields: object) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def fields_of(message: Message) -> dict[str, Any]:
    return json.loads(encode(message))


def accepts(kind: type[Message], name: str, value: object) -> bool:
    """Whether a field may have this value, as JSON has it."""
    types: dict[object, Any] = {
        str: isinstance(value, str),
        int: type(value) is int,
        float: isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e9,
        bool: isinstance(value, bool),
        tuple[str, ...]: isinstance(value, list) and all(isinstance(item, str) for item in value),
        tuple[int, ...]: isinstance(value, list) and all(type(item) is int for item in value),
    }
    types[TeacherCounts] = types[WorkReport] = False  # of the values above, none has their fields
    optional = {str | None: str, int | None: int, float | None: float, TeacherCounts | None: TeacherCounts,
                WorkReport | None: WorkReport}  # fmt: skip
    hint = get_type_hints(kind)[name]
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    return value is None if hint in optional and value is None else types[optional.get(hint, hint)]


def test_every_message_is_tried():
    assert {type(message) for message in MESSAGES} == set(KNOWN.values())
    assert len(KNOWN) == sum(map(len, SIDES)), "two messages have one word"


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
class TestMessage:
    def test_it_arrives_as_it_was_sent_in_one_line(self, message: Message) -> None:
        words = encode(message)
        assert words.endswith(b"\n")
        assert words.count(b"\n") == 1
        assert decode(words, KNOWN) == message
        assert fields_of(message)["what"] == type(message).__name__.lower()

    def test_without_one_of_its_fields_it_is_refused(self, message: Message) -> None:
        for name in fields_of(message):
            fields = fields_of(message)
            del fields[name]
            with pytest.raises(ProtocolError, match=name):
                decode(line(fields), KNOWN)

    def test_with_another_field_it_is_refused(self, message: Message) -> None:
        with pytest.raises(ProtocolError, match="has no field 'more'"):
            decode(line({**fields_of(message), "more": 1}), KNOWN)

    def test_a_field_has_the_type_that_is_written_down_for_it(self, message: Message) -> None:
        for name in vars(message):
            for value in VALUES:
                words = line({**fields_of(message), name: value})
                if accepts(type(message), name, value):
                    assert isinstance(decode(words, KNOWN), type(message))
                else:
                    with pytest.raises(ProtocolError, match=name):
                        decode(words, KNOWN)

    def test_nobody_else_may_send_it(self, message: Message) -> None:
        others = [side for side in SIDES if type(message) not in side.values()]
        assert len(others) == len(SIDES) - 1
        for side in others:
            with pytest.raises(ProtocolError, match=f"its 'what' is '{type(message).__name__.lower()}'"):
                decode(encode(message), side)


@pytest.mark.parametrize(
    "words",
    [
        b"", b"\n", b"\xff\xfe", b"nonsense", b"[]", b"7", b"null", b"{}", b'{"what": 7}', b'{"what": ["done"]}',
        b'{"what": "magic"}', b'{"what": "done"', b"[" * 100_000, b'{"what": ' * 100_000,
        b'{"what": "notice", "left_s": 1e999}',
    ],
    ids=lambda words: repr(words[:30]),
)  # fmt: skip
def test_what_is_no_message_is_refused(words: bytes) -> None:
    with pytest.raises(ProtocolError, match=rf"^cannot read a line of {len(words)} bytes as a message: "):
        decode(words, KNOWN)


def test_a_refusal_is_as_long_as_a_person_reads() -> None:
    words = line({"what": "raised", "step": "9" * 1_000_000, "error": "", "hopeless": False})
    with pytest.raises(ProtocolError, match=r"Raised\.step is '9+ \.\.\.; expected a whole number") as raised:
        decode(words, KNOWN)
    assert len(str(raised.value)) < 500


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(Hello("secret", "a:0", 1)) + repr(WatchHello("secret", "a:0", 1))
