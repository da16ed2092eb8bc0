"""Writes in a thread of their own."""

from __future__ import annotations

import threading

from waiting import soon

from edl_hvd.background_writes import BackgroundWrites


def test_they_are_made_in_order_and_the_caller_does_not_wait() -> None:
    written: list[tuple[str, bytes]] = []
    has_begun, may_go_on = threading.Event(), threading.Event()

    def write(place: str, data: bytes) -> None:
        has_begun.set()
        soon(may_go_on)
        written.append((place, data))

    writes = BackgroundWrites[str](write, most_waiting_bytes=10)
    writes.put("a", b"1234")
    soon(has_begun)
    for place, data in (("a", b"5"), ("a", b"6"), ("b", b"7"), ("a", b"8")):
        assert writes.has_room
        writes.put(place, data)
    writes.put("a", b"90")
    assert not writes.has_room, "what is being written takes room, too"
    assert written == []
    may_go_on.set()
    writes.drain()
    assert written == [("a", b"1234"), ("a", b"56"), ("b", b"7"), ("a", b"890")]
    assert writes.has_room


def test_a_thread_is_started_by_the_first_write_only() -> None:
    before = threading.active_count()
    writes = BackgroundWrites[str](lambda place, data: None)
    writes.drain()
    assert threading.active_count() == before
