"""What is kept of a kind of objects, and a server as a value: events come late, and answers to writes in between."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from edl_hvd.kubernetes.api import WatchEvent
from edl_hvd.kubernetes.informer import ObjectCache, key_of

NAMES = ("a", "b")
Kept = tuple[str, int]
STEPS = (
    "create", "change", "delete", "write", "write", "rewrite", "rewrite", "answer", "answer", "answer", "begin list",
    "end list", "bookmark", "tell", "tell",
)  # fmt: skip


def read(item: Mapping[str, Any]) -> Kept:
    return item["metadata"]["uid"], int(item["metadata"]["resourceVersion"])


class Server:
    """The truth, and a cache that is told of it: by a watch, by lists, and by the answers to the operator's writes."""

    def __init__(self) -> None:
        self.revision, self.told = 100, 100
        self.objects: dict[str, dict[str, Any]] = {}
        self.events: list[WatchEvent] = []
        self.cache: ObjectCache[Kept] = ObjectCache(read)
        self.answer: dict[str, Any] | None = None
        self.listed: tuple[dict[str, dict[str, Any]], int] | None = None
        self.answered: dict[str, int] = {}
        self.cache.begin()
        self.cache.replace({}, str(self.revision))

    def put(self, name: str, is_new: bool, is_ours: bool) -> None:
        if is_new == (name in self.objects) or (is_ours and self.answer is not None):
            return
        self.revision += 1
        uid = f"uid-{self.revision}" if is_new else self.objects[name]["metadata"]["uid"]
        item = {"metadata": {"name": name, "namespace": "n", "uid": uid, "resourceVersion": str(self.revision)}}
        self.objects[name] = item
        self.events.append(WatchEvent("ADDED" if is_new else "MODIFIED", item))
        if is_ours:
            self.answer = item

    def delete(self, name: str) -> None:
        if (item := self.objects.pop(name, None)) is not None:
            self.revision += 1
            gone = {"metadata": {**item["metadata"], "resourceVersion": str(self.revision)}}
            self.events.append(WatchEvent("DELETED", gone))

    def do(self, what: str, which: str) -> None:
        match what:
            case "create" | "write":
                self.put(which, is_new=True, is_ours=what == "write")
            case "change" | "rewrite":
                self.put(which, is_new=False, is_ours=what == "rewrite")
            case "delete":
                self.delete(which)
            case "answer" if self.answer is not None:
                self.cache.write(self.answer)
                self.answered[self.answer["metadata"]["name"]] = int(self.answer["metadata"]["resourceVersion"])
                self.answer = None
            case "begin list":
                self.cache.begin()
                self.listed = dict(self.objects), self.revision
            case "end list" if self.listed is not None:
                items, revision = self.listed
                kept = {key_of(item): self.cache.kept(item) for item in items.values()}
                self.cache.replace(kept, str(revision))
                self.told, self.listed = revision, None
            case "tell" if self.listed is None:
                self.tell()
            case "bookmark" if self.listed is None and not self.rest():
                mark = {"metadata": {"resourceVersion": str(self.revision)}}
                assert self.cache.apply(WatchEvent("BOOKMARK", mark)) is False
                self.told = self.revision

    def rest(self) -> list[WatchEvent]:
        return [event for event in self.events if read(event.item)[1] > self.told]

    def tell(self) -> None:
        if rest := self.rest():
            before = self.seen()
            assert self.cache.apply(rest[0]) == (self.seen() != before)
            self.told = read(rest[0].item)[1]

    def seen(self) -> dict[str, int]:
        return dict(self.cache.values())

    def old_writes(self) -> list[str]:
        """Objects that the cache has older than they were written, or not although they are there."""
        seen = self.seen()
        gone = {event.item["metadata"]["uid"] for event in self.events if event.type == "DELETED"}
        written = {revision: name for name, revision in self.answered.items()}
        uids = {revision: uid for uid, revision in map(read, (event.item for event in self.events))}
        return [written[one] for one in written if seen.get(uids[one], 0) < one and uids[one] not in gone]


@pytest.mark.parametrize("seed", range(20))
def test_it_is_never_older_than_own_writes_and_in_the_end_all_is_there(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(50):
        server, steps = Server(), []
        for _ in range(50):
            steps.append((chance.choice(STEPS), chance.choice(NAMES)))
            server.do(*steps[-1])
            assert server.old_writes() == [], steps
        server.do("end list", "")
        server.do("answer", "")
        while server.rest():
            server.tell()
        assert server.seen() == dict(read(item) for item in server.objects.values()), steps


def test_an_own_write_comes_back_without_being_news() -> None:
    server = Server()
    server.do("write", "a")
    server.do("answer", "")
    assert list(server.seen().values()) == [101]
    assert server.cache.apply(server.events[0]) is False
    server.do("change", "a")
    assert server.cache.apply(server.events[1]) is True


def test_the_answer_to_a_write_that_was_deleted_meanwhile_brings_nothing_back() -> None:
    server = Server()
    server.do("write", "a")
    server.do("delete", "a")
    while server.rest():
        server.tell()
    server.do("answer", "")
    assert server.seen() == {}


def test_after_a_restored_backup_nothing_of_before_stays() -> None:
    server = Server()
    for what in ("write", "answer", "begin list"):
        server.do(what, "a")
    server.cache.replace({}, "7")
    assert server.seen() == {}
    server.cache.write({"metadata": {"name": "a", "namespace": "n", "uid": "new", "resourceVersion": "8"}})
    assert server.seen() == {"new": 8}
