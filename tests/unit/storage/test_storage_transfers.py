"""Cutting large objects, several parts at once, and trying again: what is decided without a network."""

from __future__ import annotations

import random
import threading
import zlib

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    ReadTimeoutError,
    SSLError,
)
from clocks import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from edl_hvd.storage.parts import ByteRange, Cut, side_by_side
from edl_hvd.storage.pieces import Pieces
from edl_hvd.storage.retries import Attempts, GaveUpError, Patience, pause_s
from edl_hvd.storage.s3_requests import _CONNECT_TIMEOUT_S, _CRC32, _LAST_WORD_S, passes

HANGS_S = 30


class Passing(Exception):
    pass


def attempts(clock: FakeClock, patience: Patience | None = None, stopped: threading.Event | None = None) -> Attempts:
    return Attempts(patience or Patience(), lambda error: isinstance(error, Passing), clock, stopped)


@given(st.integers(0, 10**14), st.integers(0, 10**14), st.integers(5_000_000, 10**9))
def test_parts_hold_every_byte_once_and_s3_takes_that_many(start: int, length: int, part_bytes: int) -> None:
    parts = Cut(part_bytes).parts(start, start + length)
    bounds = [start, *(part.stop for part in parts)]
    assert [part.start for part in parts] == bounds[:-1]
    assert bounds[-1] == start + length
    assert [part.number for part in parts] == list(range(1, len(parts) + 1))
    assert len(parts) <= 10_000
    assert len({part.stop - part.start for part in parts[:-1]}) <= 1


@given(st.lists(st.binary(max_size=5000), min_size=1))
def test_whichever_library_computes_it_the_checksum_is_the_crc_32(pieces: list[bytes]) -> None:
    value = 0
    for piece in pieces:
        value = _CRC32(memoryview(piece), value)
    assert value == zlib.crc32(b"".join(pieces))


@pytest.mark.parametrize(("memory_mb", "connections"), [(0, 1), (1, 1), (6.3, 2), (12, 3), (64, 16), (10_000, 16)])
def test_less_memory_means_fewer_connections(memory_mb: float, connections: int) -> None:
    assert Cut.within(memory_mb).connections == connections


@given(st.lists(st.binary(max_size=20), max_size=8), st.data())
def test_any_range_of_the_pieces_is_that_of_the_joined_bytes(buffers: list[bytes], data: st.DataObject) -> None:
    joined = b"".join(buffers)
    pieces = Pieces(buffers)
    start = data.draw(st.integers(0, len(joined)))
    stop = data.draw(st.integers(start, len(joined)))
    largest = data.draw(st.integers(1, 25))
    views = list(pieces.views(start, stop, largest))
    assert b"".join(views) == joined[start:stop]
    assert all(0 < view.nbytes <= largest for view in views)
    assert (pieces.size_bytes, pieces.joined()) == (len(joined), joined)


def test_every_part_is_worked_on_once() -> None:
    parts = Cut(10).parts(0, 95)
    seen: list[ByteRange] = []
    side_by_side(lambda part, stopped: seen.append(part), parts, connections=4)
    assert sorted(part.number for part in seen) == list(range(1, 11))


def test_the_first_error_ends_the_transfer_without_waiting_for_a_part_that_hangs() -> None:
    release, ended, begun = threading.Event(), threading.Event(), threading.Barrier(2, timeout=HANGS_S)

    def work(part: ByteRange, stopped: threading.Event) -> None:
        if part.number <= 2:
            begun.wait(HANGS_S)
        if part.number == 1:
            release.wait(HANGS_S)
            assert stopped.is_set()
            ended.set()
            return
        raise Passing(part.number)

    with pytest.raises(Passing, match="2"):
        side_by_side(work, Cut(10).parts(0, 100), connections=2)
    assert not ended.is_set()
    release.set()
    assert ended.wait(HANGS_S)


@pytest.mark.parametrize("attempt_s", [0.0, 0.5, _CONNECT_TIMEOUT_S, Patience().stall_s])
def test_a_storage_that_does_not_answer_is_reported_within_a_minute(attempt_s: float) -> None:
    clock = FakeClock()
    began_s = clock.now_s

    def fail() -> None:
        clock.sleep(attempt_s)
        raise Passing("nobody there")

    with pytest.raises(GaveUpError, match=r"\d+ attempts within \d+ s") as caught:
        attempts(clock).make(fail)
    assert isinstance(caught.value.error, Passing)
    assert clock.now_s - began_s + 2 * _LAST_WORD_S < 60


def test_pauses_are_random_and_grow_to_a_bound() -> None:
    numbers = random.Random(5)
    longest = [max(pause_s(failures, numbers) for _ in range(300)) for failures in range(1, 12)]
    assert longest == sorted(longest[:5]) + longest[5:]
    assert 4.5 < max(longest) <= 5
    assert len({pause_s(3, numbers) for _ in range(10)}) == 10


def test_progress_begins_the_time_allowed_anew() -> None:
    clock = FakeClock()
    trial = attempts(clock)
    began_s = clock.now_s

    def advance() -> str:
        clock.sleep(10)
        if trial.made == 20:
            return "done"
        trial.progress()
        raise Passing

    assert trial.make(advance) == "done"
    assert clock.now_s - began_s > 200


def test_an_error_that_will_not_pass_is_raised_as_it_is() -> None:
    trial = attempts(FakeClock())

    def fail() -> None:
        raise Passing if trial.made < 3 else KeyError("refused")

    with pytest.raises(KeyError):
        trial.make(fail)
    assert trial.made == 3


def test_attempts_end_at_their_number_and_when_they_are_stopped() -> None:
    def fail() -> None:
        raise Passing

    trial = attempts(FakeClock(), Patience(attempts=4))
    with pytest.raises(GaveUpError, match="4 attempts"):
        trial.make(fail)
    stopped = threading.Event()
    stopped.set()
    trial = attempts(FakeClock(), stopped=stopped)
    with pytest.raises(Passing):
        trial.make(fail)
    assert trial.made == 1


@pytest.mark.parametrize(
    ("error", "worth_it"),
    [
        (ClientError({"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 503}}, "x"), True),
        (ClientError({"Error": {"Code": "InternalError"}, "ResponseMetadata": {"HTTPStatusCode": 500}}, "x"), True),
        (ClientError({"Error": {"Code": "RequestTimeout"}, "ResponseMetadata": {"HTTPStatusCode": 400}}, "x"), True),
        (ClientError({"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}, "x"), False),
        (ClientError({"Error": {"Code": "NotImplemented"}, "ResponseMetadata": {"HTTPStatusCode": 501}}, "x"), False),
        (ClientError({"Error": {"Code": "NoSuchKey"}, "ResponseMetadata": {"HTTPStatusCode": 404}}, "x"), False),
        (EndpointConnectionError(endpoint_url="x"), True),
        (ConnectTimeoutError(endpoint_url="x"), True),
        (ReadTimeoutError(endpoint_url="x"), True),
        (SSLError(endpoint_url="x", error="EOF occurred in violation of protocol"), True),
        (SSLError(endpoint_url="x", error="certificate verify failed: self-signed certificate"), False),
        (NoCredentialsError(), False),
        (ValueError(), False),
    ],
)
def test_what_is_worth_another_attempt(error: Exception, worth_it: bool) -> None:
    assert passes(error) == worth_it
